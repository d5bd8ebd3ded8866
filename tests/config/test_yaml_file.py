"""Configurations that are found by name, from any folder, as in an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.config.read import about
from megapar.config.yaml_file import FOLDER, config_path, load_pairs, near_preset, preset_names
from megapar.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_package_has_the_files_of_the_repository() -> None:
    assert FOLDER.resolve() == ROOT / "configs"
    assert preset_names() == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert "mixtral-8x7b" in preset_names()


@pytest.mark.parametrize("name", ["tiny", "tiny.yaml"])
def test_a_name_is_found_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("moe", ["--config", name], {}).model.hidden_size == 64
    assert about([name]).script == "pretrain_moe.py"


def test_a_file_takes_precedence_and_a_folder_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert config_path("tiny") == str(FOLDER / "tiny.yaml")
    Path("tiny.yaml").write_text("hidden_size: 96\n", encoding="utf-8")
    assert config_path("tiny.yaml") == "tiny.yaml"
    assert parse("moe", ["--config", "tiny.yaml", "--num-attention-heads", "4"], {}).model.hidden_size == 96


@pytest.mark.parametrize("path", ["other/tiny.yaml", "./tiny", "/tiny", "..", "", "no-such"])
def test_a_path_is_no_name(path: str) -> None:
    assert config_path(path) == path


def test_a_file_of_a_checkout_leads_to_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="In every installation there is --config mixtral-8x7b") as refused:
        parse("moe", ["--config", "configs/mixtral-8x7b.yaml"], {})
    assert "does not contain 'configs'" in str(refused.value)
    assert near_preset("quite-another.yaml") == ""


def test_numbers_reach_the_flags_as_they_are_written() -> None:
    pairs = dict(load_pairs("a: 1.10\nb: 0.00001\nc: [.5, 1e-3, 3:4]\nd: 010\n"))
    assert pairs == {"a": "1.10", "b": "0.00001", "c": [".5", "1e-3", "3:4"], "d": "010"}
    phases = {
        "data_path": ["a=a.jsonl", "b=b.jsonl"],
        "data_phases": "0: a=.5,b=0.00001; 1.0e+2 iterations: a=5.0e-1,b=1.",
    }
    assert parse("moe", {**phases, "rules_only": True}, {}).data.data_phases is not None
