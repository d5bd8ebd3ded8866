"""Runs of one process, in the test's own, so that what they call can be replaced."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from megapar.arguments import parse
from megapar.trainer import Outcome, train
from tests.support.training import COMMON, SMALL, last_wins

BASE = ("--lr-decay-iters", "6", "--save-interval", "2")


def run_here(root: Path, *flags: str, **environ: str) -> Outcome:
    """Six steps of a small decoder that saves every second one under ``root``, unless flags say otherwise.

    environ: variables of the process meanwhile.
    """
    line = last_wins((*SMALL["moe"], *COMMON), (*BASE, "--save", str(root), *flags))
    with patch.dict(os.environ, environ):
        return train(parse("moe", line, {}), keep_records=True)


def losses(outcome: Outcome) -> dict[int, float]:
    """Of every iteration that was run."""
    return {record.iteration: record.loss for record in outcome.records}
