"""Elastic jobs: the nearest legal layout for the ranks that are there, and a restart in place of a rank that died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.planning.nearest import nearest
from megapar.tools.launcher.elastic import command
from megapar.tools.launcher.launch_options import make_parser

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
    line, told = command(["4", "pretrain_moe.py", *SMALL, "--global-batch-size", "8"], 2)
    assert line[0] == "pretrain_moe.py"
    assert told == "2 of 4 ranks are present: sharding 4 -> 2; the global batch is unchanged"
    assert command(["4", "job.py", "--lr", "1"], 2) == (["job.py", "--lr", "1"], "")
    with pytest.raises(LookupError, match="no layout of 3 ranks is legal"):
        command(["4", "pretrain_moe.py", *SMALL, "--global-batch-size", "8"], 3)


def test_a_full_disk_under_the_log_keeps_no_rank_from_its_script(tmp_path: Path) -> None:
    job = tmp_path / "pretrain_moe.py"
    job.write_text("print('started')")
    line = [sys.executable, "-m", "megapar.tools.launcher.elastic", "4", str(job), *SMALL, "--global-batch-size", "8"]
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
