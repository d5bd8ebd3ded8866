"""Completion: which parser completes a line, and the answers that a shell gets where argcomplete is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.config.yaml_file import preset_names
from megapar.tools.completion import VARIABLE, _configurations, parser_of
from megapar.tools.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


def answers(line: str, folder: Path) -> list[str]:
    """The words that a shell offers at the end of a line."""
    output = folder / "answers"
    asked = {VARIABLE: "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(output)}
    place = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "megapar"]
    assert subprocess.run(command, env={**os.environ, **asked, **place}, cwd=folder).returncode == 0
    return output.read_text(encoding="utf-8").split()


def test_every_command_can_be_completed() -> None:
    for name in COMMANDS.keys() - {"pretrain"}:
        assert parser_of(["megapar", name], COMMANDS).parser.prog == f"megapar {name}"


@pytest.mark.parametrize(
    ("line", "at", "option"),
    [
        ("megapar", 0, "--help"),
        ("megapar plan", 1, "--search"),
        ("megapar plan --config a.yaml", 1, "--moe-router-topk"),
        ("megapar pretrain moe", 2, "--moe-router-topk"),
        ("megapar pretrain ernie --lr 1", 2, "--mlm-probability"),
        ("megapar launch --nproc-per-node 2", 1, "--max-restarts"),
        ("megapar launch --nproc-per-node 2 pretrain moe", 5, "--num-experts"),
        ("megapar launch --nproc-per-node 2 pretrain_ernie.py --lr 1", 4, "--mlm-probability"),
        ("megapar launch evaluate runs/a", 2, "--eval-data-path"),
    ],
)
def test_the_parser_is_that_of_the_words_before(line: str, at: int, option: str) -> None:
    found = parser_of(line.split(), COMMANDS)
    assert found.at == at
    assert option in found.parser._option_string_actions


def test_a_trainer_offers_only_its_own_flags() -> None:
    assert "--num-experts" not in parser_of(["megapar", "pretrain", "ernie"], COMMANDS).parser._option_string_actions


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megapar gen", ["generate"]),
        ("megapar pretrain ", ["moe", "ernie"]),
        ("megapar launch --nproc-per-node 2 pretrain moe --config mix", ["mixtral-8x7b"]),
        ("megapar pretrain moe --no-qk-n", ["--no-qk-norm"]),
    ],
)
def test_a_shell_gets_the_words_that_may_follow(line: str, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert answers(line, tmp_path) == words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", shell]) == 0
    assert "megapar" in capsys.readouterr().out


def test_without_argcomplete_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install argcomplete" in capsys.readouterr().err


def test_a_configuration_is_a_name_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("a.yaml", "a.txt"):
        (tmp_path / name).touch()
    offered = list(_configurations(f"{tmp_path}/"))
    assert offered == [*preset_names(), f"{tmp_path}/a.yaml", f"{tmp_path}/runs/"]
