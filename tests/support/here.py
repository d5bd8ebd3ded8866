"""Runs of one process in the process of the test, so that a test can replace what they call."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from megapar.arguments import parse
from megapar.trainer import Outcome, train
from tests.support.training import COMMON, SMALL, last_wins

BASE = ("--lr-decay-iters", "6", "--save-interval", "2")


def run_here(root: Path, *flags: str, **environ: str) -> Outcome:
    """Train a small decoder for six steps, with a checkpoint under ``root`` after every second one.

    Args:
        root: Folder of the checkpoints.
        flags: Further flags, which override these.
        environ: Environment variables during the run.
    """
    line = last_wins((*SMALL["moe"], *COMMON), (*BASE, "--save", str(root), *flags))
    with patch.dict(os.environ, environ):
        return train(parse("moe", line, environ), keep_records=True)


def losses(outcome: Outcome) -> dict[int, float]:
    """Return the loss of every iteration of a run."""
    return {record.iteration: record.loss for record in outcome.records}
