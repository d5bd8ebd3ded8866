"""The ``megapar`` command: its commands, and only those that exist."""

from __future__ import annotations

import shlex
from pkgutil import resolve_name

import pytest

from megapar.arguments import FLAGS
from megapar.compatibility import RULES
from megapar.tools.main import COMMANDS, main

OPTIONS = {"launch": "launcher.launch_options"}  # where a command's parser is, if not in its own module


def test_commands_of_this_version() -> None:
    names = "completion configs convert data evaluate generate launch plan pretrain report rules translate"
    assert " ".join(sorted(COMMANDS)) == names


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name}" in printed for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"pretrain", "rules", "completion"}))
def test_help_of_a_command_begins_with_examples_that_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = resolve_name(f"megapar.tools.{OPTIONS.get(name, COMMANDS[name][0])}:make_parser")()
    printed = parser.format_help()
    assert printed.startswith(f"examples:\n  megapar {name} {parser.examples[0]}\n")
    assert f"\n\nusage: megapar {name} " in printed
    for example in parser.examples:
        words = shlex.split(example.partition(" > ")[0].partition("   ")[0])
        _, rest = parser.parse_known_args(words)
        assert not rest or name in ("plan", "evaluate")
        assert {word.removeprefix("--").replace("-", "_") for word in rest if word.startswith("--")} <= FLAGS.keys()


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanch"]) == 2
    assert "Did you mean launch?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert f"Commands: {', '.join(COMMANDS)}." in capsys.readouterr().err


def test_rules_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if line.startswith("  ") and line[2] != " "] == [
        rule.id
        for kind in ("refuse", "downgrade", "advice", "lifted", "not-built", "settled")
        for rule in RULES
        if rule.kind == kind
    ]


def test_rules_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--kind", "lifted"]) == 0
    printed = capsys.readouterr().out
    assert "deepspeed-topk" in printed
    assert "mp-heads" not in printed


@pytest.mark.parametrize("argv", [["mp-heads"], ["show", "mp-heads"], ["[mp-heads]"]])
def test_one_row_is_shown_as_a_refusal_names_it(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", *argv]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("  mp-heads\n      --mp-degree must divide")
    assert "Satisfied by: --world-size 2" in printed
    assert "the run does not start" in printed
    assert "mp-groups" not in printed
