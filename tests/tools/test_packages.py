"""An old Python and a Python without the packages: one sentence, no traceback."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.config import files
from megapar.errors import ConfigError
from megapar.tools.packages import NEWEST_TORCH, OLDEST_TORCH, check_torch, packages_or_exit

ROOT = Path(__file__).parents[2]
SELDOM = ("datasets", "tensorboard", "pyarrow", "transformers", "ahocorasick", "wandb", "mlflow", "swanlab", "lm_eval")
"""Modules of packages that few runs need: required ones, and those of extras."""


@pytest.mark.parametrize(
    "command", [["pretrain_moe.py", "--config", "tiny"], ["-m", "megapar", "plan", "--config", "tiny"]]
)
def test_a_missing_package_is_one_sentence(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-S", *command], capture_output=True, text=True, cwd=ROOT)  # -S: no packages
    assert done.returncode == 1
    assert done.stderr.startswith(f"megapar: {sys.executable} has no package yaml: ")
    assert done.stderr.count("\n") == 1


def test_other_modules_are_errors_of_the_code() -> None:
    with pytest.raises(ModuleNotFoundError, match="megapar_none"), packages_or_exit():
        __import__("megapar_none")


def test_an_old_python_is_named_before_a_file_that_it_cannot_read() -> None:
    code = "import sys; sys.version_info = (3, 9); import megapar"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.startswith("megapar needs Python 3.10 or later, and ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["trainer", "tools.data", "data.tokens.prepare", "data.sampling.streaming"])
def test_what_few_runs_need_is_not_imported_with_the_package(module: str) -> None:
    code = f"import sys, megapar.{module}; print(sorted(set({SELDOM}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("moe", "--num-experts 4 --moe-ffn-hidden-size 16"),
        (
            "ernie",
            "--ernie-model ernie3 --task-type-vocab-size 5 --ernie-tasks knowledge_mlm:1,document_lm:1 "
            "--task-hidden-size 16 --task-num-attention-heads 2",
        ),
    ],
)
def test_a_run_does_without_what_it_does_not_use(kind: str, flags: str) -> None:
    small = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --vocab-size 64"
    small += " --train-iters 1 --eval-interval 0 --data-path mock"
    code = f"""
import sys
sys.modules |= dict.fromkeys({SELDOM})
from megapar.arguments import parse
from megapar.trainer import train
assert train(parse({kind!r}, {f"{flags} {small}".split()!r}, {{}})).iteration == 1"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", files.PACKAGES)
def test_a_package_of_an_extra_is_refused_by_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    module, package, extra = files.PACKAGES[name]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [line.partition(">")[0] for line in extras[extra]] == [package]
    (tmp_path / "words.txt").write_text("a b\n", encoding="utf-8")
    value = str(tmp_path / "words.txt") if name.endswith("_file") else "name"
    monkeypatch.setattr(files, "find_spec", lambda asked: None if asked == module else importlib.util.find_spec(asked))
    kind = "ernie" if name.endswith("_file") else "moe"
    ernie3 = ["--ernie-model", "ernie3", "--task-type-vocab-size", "5", "--ernie-tasks", "knowledge_mlm:1"]
    with pytest.raises(ConfigError) as caught:
        parse(kind, [f"--{name.replace('_', '-')}", value, *(ernie3 if kind == "ernie" else [])], {})
    said = f'needs the package {package}, which is not installed. Install it with: pip install "megapar[{extra}]"'
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("found", "rank", "said"),
    [
        ("2.10.1", "1", "megapar: torch 2.10.1 is too old: pip install 'torch>=2.11'"),
        ("2.11.0a0+git123", "0", ""),
        ("2.14.9+cu130", "0", ""),
        ("2.99.0", "0", "megapar: note: tested with torch 2.11 to 2.14, this is 2.99.0\n"),
        ("2.99.0", "1", ""),
    ],
)
def test_a_torch_that_was_not_tested_is_named(
    found: str, rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    if "too old" in said:
        with pytest.raises(SystemExit) as left:
            check_torch({"RANK": rank})
        assert left.value.code == said
    else:
        check_torch({"RANK": rank})
        assert capsys.readouterr().err == said


def test_the_tested_torch_is_the_same_everywhere() -> None:
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST_TORCH, NEWEST_TORCH))
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt", "README.md")
    }
    assert f'"torch>={oldest}"' in texts["pyproject.toml"]
    assert f"tested with torch {oldest} to {newest}:" in texts["README.md"]
    pinned = re.findall(r"^torch==(\d+)\.(\d+)", texts["constraints.txt"], re.MULTILINE)
    assert [OLDEST_TORCH <= (int(major), int(minor)) <= NEWEST_TORCH for major, minor in pinned] == [True]
