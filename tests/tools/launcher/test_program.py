"""The program of a launch: a script, or a command of megapar."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.errors import CheckpointError
from megapar.tools.launcher import own
from megapar.tools.launcher.elastic import command
from megapar.tools.launcher.launch_options import make_parser, read
from megapar.tools.launcher.program import RANK_COMMANDS, Program, arguments_of, complaints_about
from megapar.tools.launcher.warm import wants_warm_start


def test_a_script_is_run_as_it_is_named() -> None:
    line = arguments_of("jobs/pretrain_moe.py", ["--lr", "1"])
    assert line == ("jobs/pretrain_moe.py", "--lr", "1")
    assert Program.of(line) == Program(("jobs/pretrain_moe.py",), ("--lr", "1"), "moe")
    assert Program.of(["job.py", "--lr", "1"]) == Program(("job.py",), ("--lr", "1"), "")


def test_a_command_is_run_from_this_package() -> None:
    line = arguments_of("pretrain", ["ernie", "--lr", "1"])
    start = (*own.module_command("megapar.tools.pretrain"), "ernie")
    assert line == (*start, "--lr", "1")
    assert Program.of(line) == Program(start, ("--lr", "1"), "ernie")
    assert Path(start[0]).is_file()


def test_the_launcher_reads_a_command_with_its_flags() -> None:
    options = make_parser().parse_args(["--nproc-per-node", "2", "pretrain", "moe", "--config", "tiny"])
    assert (options.script, options.flags) == ("pretrain", ["moe", "--config", "tiny"])
    launch, _ = read(["--nproc-per-node", "2", "pretrain", "moe", "--config", "tiny"])
    assert launch.command[1:] == ("megapar.tools.pretrain", "moe", "--config", "tiny")


def test_an_elastic_job_gives_a_command_the_layout_of_the_ranks_that_are_there() -> None:
    line = ["4", *arguments_of("pretrain", ["moe", "--config", "tiny"])]
    found, told = command(line, 2)
    assert found[: len(line) - 1] == line[1:]
    assert "--sharding-degree" in found
    assert told == "2 of 4 ranks are present: sharding 4 -> 2; the global batch is unchanged"
    assert command(line, 4) == (line[1:], "")


@pytest.mark.parametrize(
    ("program", "flags", "complaint"),
    [
        ("pretrain", ["--config", "tiny"], "--config is not the name of a model"),
        ("pretrain", [], "nothing is not the name of a model"),
        ("pretrain_ernie.py", [], "does not exist. Without a checkout, write pretrain ernie in its place"),
        ("no/job.py", [], "script no/job.py does not exist"),
    ],
)
def test_what_cannot_run_is_refused(
    program: str, flags: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint in "".join(complaints_about(program, flags))


def test_evaluate_reads_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no readable checkpoint"):
        arguments_of("evaluate", [str(tmp_path)])


def test_commands_start_warm_as_the_scripts_do() -> None:
    usual = wants_warm_start(None, "pretrain_moe.py")
    assert {wants_warm_start(None, name) for name in RANK_COMMANDS} == {usual}
    assert not wants_warm_start(None, "job.py")
