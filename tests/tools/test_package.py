"""The commands that an installed package has in place of a checkout's scripts and folders.

``scripts/wheel_test.sh`` builds the wheel, installs it alone and runs every command of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megapar import __version__
from megapar.arguments import parse
from megapar.config.published import flags_of
from megapar.config.yaml_file import FOLDER, load_pairs, preset_names
from megapar.model.architectures import ARCHITECTURES
from megapar.model.spec import spec_of
from megapar.tools.configs import yaml_of
from megapar.tools.main import main
from tests.model.test_architectures import SIZES, settings_of

ROOT = Path(__file__).parents[2]


def test_configs_lists_each_name_with_its_model_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    assert {line.split()[1] for line in lines} == {"moe", "ernie"}
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("name", ["tiny", "tiny.yaml"])
def test_configs_prints_a_file_to_copy(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", name]) == 0
    assert capsys.readouterr().out == (FOLDER / "tiny.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tinny", "Did you mean tiny?"), ("configs/tiny.yaml", ""), ("../README", "megapar configs lists them.")],
)
def test_configs_refuses_what_the_package_has_not(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", name]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("name", SIZES)
def test_configs_of_a_published_model_train_that_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ARCHITECTURES[name].config(settings_of(name)) | {"initializer_range": 0.013, "router_aux_loss_coef": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["configs", "--from-hf", str(tmp_path)]) == 0
    (tmp_path / "its.yaml").write_text(said := capsys.readouterr().out, encoding="utf-8")
    assert "# Not in it: router_aux_loss_coef is 0.5, of another formula (docs/models.md).\n" in said
    kind, flags = flags_of(config)
    written = {line.partition(":")[0] for line in said.splitlines() if not line.startswith("#")}
    sizes_of_all = {"num_layers", "hidden_size", "num_attention_heads", "vocab_size"}
    assert written >= sizes_of_all | ({"num_experts", "moe_router_topk"} & set(flags))
    parsed = parse(kind, ["--config", str(tmp_path / "its.yaml"), "--data-path", "mock", "--seq-length", "8"])
    sizes = parsed.model
    assert parsed.values()["init_std"] == 0.013
    settings = spec_of(sizes).published.settings(sizes)
    assert {flag: settings[flag] for flag in flags} == flags


def test_an_editable_installation_is_not_hidden_by_a_folder_of_its_name(tmp_path: Path) -> None:
    """As in a script beside a clone: a path comes before such a folder, a finder of setuptools after it."""
    source = tmp_path / "megapar"
    (source / "megapar").mkdir(parents=True)
    (source / "megapar" / "__init__.py").write_text("__version__ = '1'\n", encoding="utf-8")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools.build_meta import build_editable as build; print(build(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        outside = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert [wheel.read(name).decode().strip() for name in outside] == [str(source)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "does not exist"),
        ('{"architectures": ["Gemma2ForCausalLM"]}', "which caps scores and logits"),
        ('{"architectures": ["LlamaForCausalLM"]}', "lacks 'vocab_size'"),
    ],
)
def test_configs_refuses_what_cannot_be_trained(
    text: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["configs", "--from-hf", str(path)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--config", "tiny"], "Write megapar pretrain moe or megapar pretrain ernie, then the flags."),
        (["pretrain_ernie.py"], "Did you mean ernie?"),
        (["erni"], "Did you mean ernie?"),
    ],
)
def test_pretrain_needs_a_model_first(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", *argv]) == 2
    assert hint in capsys.readouterr().err


def test_pretrain_lists_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--help"]) == 0
    assert "megapar pretrain ernie --help" in capsys.readouterr().out
    assert main(["pretrain"]) == 2


def test_pretrain_trains_as_the_script_of_its_model(tmp_path: Path) -> None:
    line = ["--config", "tiny", "--validate-only", "--hidden-size", "96"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    by_script, by_command = (
        subprocess.run([sys.executable, *start, *line], capture_output=True, text=True, cwd=tmp_path, env=environ)
        for start in ([str(ROOT / "pretrain_moe.py")], ["-m", "megapar", "pretrain", "moe"])
    )
    assert by_script.returncode == by_command.returncode == 0
    assert by_command.stdout == by_script.stdout
    assert "hidden-size" in by_command.stdout


def test_the_package_runs_as_a_module() -> None:
    line = [sys.executable, "-m", "megapar", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


@pytest.mark.parametrize(
    "text", ["yes", "No", "null", "on", "tiny", "/d/\U0001f600", "1.10", "a: b", "/d/caf\udce9", "\x7f"]
)
def test_text_of_a_written_file_is_read_as_it_was(text: str) -> None:
    assert dict(load_pairs(yaml_of({"save": text}))) == {"save": text}
    assert dict(load_pairs(yaml_of({"data_path": (text, "b")}))) == {"data_path": [text, "b"]}
