"""The program of a launch, a script or a command, with the nearest legal layout for the ranks that are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.errors import CheckpointError
from megapar.planning.variation import nearest
from megapar.tools.launcher.launch_options import make_parser, read
from megapar.tools.launcher.program import (
    RANK_COMMANDS,
    Program,
    arguments_of,
    complaints_about,
    wants_warm_start,
    with_layout,
)
from megapar.tools.launcher.run_module import module_command


def test_a_script_is_run_as_it_is_named() -> None:
    line = arguments_of("jobs/pretrain_moe.py", ["--lr", "1"])
    assert line == ("jobs/pretrain_moe.py", "--lr", "1")
    assert Program.of(line) == Program(("jobs/pretrain_moe.py",), ("--lr", "1"), "moe")
    assert Program.of(["job.py", "--lr", "1"]) == Program(("job.py",), ("--lr", "1"), "")


def test_a_command_is_run_from_this_package() -> None:
    line = arguments_of("pretrain", ["ernie", "--lr", "1"])
    start = (*module_command("megapar.tools.pretrain"), "ernie")
    assert line == (*start, "--lr", "1")
    assert Program.of(line) == Program(start, ("--lr", "1"), "ernie")
    assert Path(start[0]).is_file()


def test_the_launcher_reads_a_command_with_its_flags() -> None:
    options = make_parser().parse_args(["--nproc-per-node", "2", "pretrain", "moe", "--config", "tiny"])
    assert (options.script, options.flags) == ("pretrain", ["moe", "--config", "tiny"])
    launch, _ = read(["--nproc-per-node", "2", "pretrain", "moe", "--config", "tiny"])
    assert launch.command[1:] == ("megapar.tools.pretrain", "moe", "--config", "tiny")


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


@pytest.mark.skipif(sys.platform != "linux", reason="orphans go to the launcher on Linux only")
def test_where_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wants_warm_start(True, "job.py")
    assert not wants_warm_start(False, "pretrain_moe.py")
    assert all(wants_warm_start(None, name) for name in ("/where/pretrain_moe.py", *RANK_COMMANDS))
    assert not wants_warm_start(None, "job.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch_npu")
    assert not wants_warm_start(None, "pretrain_moe.py")


ROOT = Path(__file__).parents[3]
SMALL = ("--num-layers", "2", "--num-attention-heads", "4", "--hidden-size", "32", "--micro-batch-size", "1")


@pytest.mark.parametrize(
    ("flags", "asked", "ranks", "changes"),
    [
        ((), 4, 4, "as requested"),
        ((), 4, 2, "sharding 4 -> 2"),
        (("--mp-degree", "2"), 8, 4, "sharding 4 -> 2"),
        (("--mp-degree", "2", "--sharding-degree", "2", "--hybrid-dp"), 8, 4, "dp 2 -> 1"),
        (("--mp-degree", "2"), 4, 3, None),  # a batch of 8 on 3 data ranks, and 3 divides no heads
        (("--mp-degree", "2", "--global-batch-size", "12"), 4, 3, "mp 2 -> 1, sharding 2 -> 3"),
        (("--pp-degree", "2", "--gradient-merge-acc-step", "4"), 4, 2, "sharding 2 -> 1"),
    ],
)
def test_the_nearest_layout_keeps_the_batch_and_how_the_model_is_cut(
    flags: tuple[str, ...], asked: int, ranks: int, changes: str | None
) -> None:
    batch = () if {"--global-batch-size", "--gradient-merge-acc-step"} & set(flags) else ("--global-batch-size", "8")
    line = (*SMALL, *batch, *flags)
    found = nearest("moe", line, asked, ranks)
    assert (found.changes if found else None) == changes
    if found is not None:
        config = parse("moe", found.flags, {"WORLD_SIZE": str(ranks)})
        assert (
            config.training.global_batch_size
            == parse("moe", line, {"WORLD_SIZE": str(asked)}).training.global_batch_size
        )
        assert config.grid.world_size == ranks


def test_the_script_gets_the_layout_and_people_read_of_it() -> None:
    small = ("pretrain_moe.py", *SMALL, "--global-batch-size", "8")
    for script in (small, arguments_of("pretrain", ["moe", "--config", "tiny"])):
        line, told = with_layout(["4", *script], 2)
        assert line[: len(script)] == [*script]
        assert "--sharding-degree" in line[len(script) :]
        assert told == "2 of 4 ranks are present: sharding 4 -> 2; the global batch is unchanged"
        assert with_layout(["4", *script], 4) == ([*script], "")
    assert with_layout(["4", "job.py", "--lr", "1"], 2) == (["job.py", "--lr", "1"], "")
    with pytest.raises(LookupError, match="no layout of 3 ranks is legal"):
        with_layout(["4", *small], 3)


def test_a_full_disk_under_the_log_keeps_no_rank_from_its_script(tmp_path: Path) -> None:
    job = tmp_path / "pretrain_moe.py"
    job.write_text("print('started')")
    line = [sys.executable, "-m", "megapar.tools.launcher.program", "4", str(job), *SMALL, "--global-batch-size", "8"]
    ranks = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=full, env=ranks, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"started\n")


@pytest.mark.parametrize(("text", "nodes"), [("3", (3, 3)), ("1:4", (1, 4))])
def test_nodes_are_a_number_or_a_range(text: str, nodes: tuple[int, int]) -> None:
    assert make_parser().parse_args(["--nnodes", text, "job.py"]).nnodes == nodes


@pytest.mark.parametrize("text", ["0", "4:1", "a", ":"])
def test_other_nodes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--nnodes", text, "job.py"])
    assert "--nnodes" in capsys.readouterr().err
