"""Checkpoints of every format version and of former versions, kept for ever, load for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.checkpoints.format.layout import VERSION
from megapar.checkpoints.save_load import folder as folders
from megapar.trainer import train
from tests.checkpoints.save_load.states import SCALARS, load_on
from tests.support.ranks import run_ranks

VERSIONS = sorted((Path(__file__).parent / "golden").iterdir())


@pytest.mark.parametrize("root", VERSIONS, ids=lambda root: root.name)
def test_a_golden_checkpoint_loads_on_one_process_and_on_others(root: Path) -> None:
    folder = folders.find(root)
    assert load_on(0, 1, folder, "one") == ([], SCALARS)
    assert run_ranks(2, load_on, folder, "columns") == [([], SCALARS)] * 2


def test_there_is_one_for_each_version() -> None:
    assert [root.name for root in VERSIONS] == [f"version_{number}" for number in range(1, VERSION + 1)]


GOLDEN = Path(__file__).parents[2] / "golden"
FLAGS = (
    *("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--ffn-hidden-size", "8"),
    *("--seq-length", "8", "--vocab-size", "16", "--num-experts", "0", "--data-path", "mock", "--dtype", "fp64"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-2", "--lr-decay-iters", "4"),
    *("--eval-interval", "0", "--log-interval", "100", "--device", "cpu", "--train-iters", "4"),
)
LOSSES = (2.692194314183483, 2.7228328448595436)  # of steps 3 and 4, as that version went on


def test_a_checkpoint_from_before_runs_had_identities(tmp_path: Path, told: list[str]) -> None:
    root = str(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "c"))
    outcome = train(parse("moe", [*FLAGS, "--load", root, "--save", root], {}), keep_records=True)
    assert [record.loss for record in outcome.records] == pytest.approx(LOSSES, rel=1e-9)
    assert len([line for line in told if "does not record what it was trained on" in line]) == 1
