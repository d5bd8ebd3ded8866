"""Checkpoints of former versions load for ever: tests/golden holds one as it was written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.trainer import train
from megapar.training.reports.terminal import PlainTerminal

GOLDEN = Path(__file__).parents[1] / "golden"
FLAGS = (
    *("--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--ffn-hidden-size", "8"),
    *("--seq-length", "8", "--vocab-size", "16", "--num-experts", "0", "--data-path", "mock", "--dtype", "fp64"),
    *("--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-2", "--lr-decay-iters", "4"),
    *("--eval-interval", "0", "--log-interval", "100", "--device", "cpu", "--train-iters", "4"),
)
LOSSES = (2.692194314183483, 2.7228328448595436)  # of steps 3 and 4, as that version went on


def test_a_checkpoint_from_before_runs_had_identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(PlainTerminal, "print_message", lambda self, text: told.append(text))
    root = str(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "c"))
    outcome = train(parse("moe", [*FLAGS, "--load", root, "--save", root], {}), keep_records=True)
    assert [record.loss for record in outcome.records] == pytest.approx(LOSSES, rel=1e-9)
    assert len([line for line in told if "does not record what it was trained on" in line]) == 1
