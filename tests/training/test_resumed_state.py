"""A run that stops in the middle of what it counts goes on, bit for bit, as if it had not stopped."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from megapar.core.optimizer.loss_scale import LossScale
from megapar.trainer import Trainer
from megapar.training.reports.record import Record
from megapar.training.step.step_guard import StepGuard
from tests.support.training import COMMON, SMALL, last_wins, make_trainer
from tests.training.step.test_bad_steps import ALL, run_spoiled

BIT_BY_BIT = ("skipped_steps", "optimizer_steps", "consumed_samples", "micro_batches", "spikes", "loss_scale")


@dataclass(frozen=True)
class Case:
    """A run whose activations are multiplied in some steps.

    Attributes:
        stop: The step that is saved last before the run stops.
        skipped: Steps of the whole run that change nothing.
        on_device: Steps are decided as on an accelerator.
    """

    flags: tuple[str, ...]
    bad: tuple[int, ...]
    factor: float
    stop: int
    skipped: tuple[int, ...]
    scale: LossScale | None = None
    on_device: bool = False


LONG = ("--train-iters", "20", "--global-batch-size", "2", "--spike-skip")
CASES = {
    "hysteresis": Case((), (2, 3, 5), math.inf, 3, (2, 3, 5), LossScale(1024.0, 1.0, 2.0, 4, 3)),
    "window of the scale": Case((), (1,), math.inf, 3, (1,), LossScale(1024.0, 1.0, 2.0, 4, 1)),
    "history of spikes": Case(LONG, (19,), 1e3, 10, (19,)),
    "spikes in a row": Case((*LONG, "--bad-step-limit", "2"), (18, 19, 20), 1e3, 18, (18, 19)),
    "a bad step, offloaded": Case(("--optimizer-offload", "--dtype", "bf16"), (2,), math.nan, 3, (2,)),
    "bad steps, by the device": Case(("--lr-warmup-iters", "4"), (2, 3), math.nan, 3, (2, 3), on_device=True),
}


def trained(case: Case, *flags: str) -> list[Record]:
    """The records of a run in this process."""
    line = last_wins((*SMALL["moe"], *COMMON), ("--dtype", "fp64", *case.flags, *flags))
    with ExitStack() as changes:
        if case.scale is not None:
            scale = replace(case.scale)
            changes.enter_context(patch("megapar.trainer.make_loss_scale", lambda *_: scale))
        decided = patch.object(StepGuard, "_may_decide_on_device", lambda self, config: case.on_device)
        changes.enter_context(decided)
        changes.enter_context(patch.object(Trainer, "train", run_spoiled(case.bad, 10**6, ALL, case.factor)))
        return list(make_trainer("moe", line, keep_records=True).train().records)


def facts(records: list[Record]) -> list[str]:
    """What a step did, to the bit; a norm may be no number."""
    return [repr((r.iteration, r.loss, r.grad_norm, r.lr, r.weight_decay, r.loss_scale, r.skipped)) for r in records]


def saved(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and counters of the last checkpoint."""
    last = folder / (folder / "latest").read_text().split()[0]
    tensors = {name: value for file in sorted(last.glob("*.safetensors")) for name, value in load_file(file).items()}
    scalars = json.loads((last / "scalars.json").read_text())
    return tensors, {name: scalars.get(name) for name in BIT_BY_BIT}


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_with_all_that_it_counted(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    whole = trained(case, "--save", str(tmp_path / "whole"))
    assert tuple(record.iteration for record in whole if record.skipped) == case.skipped
    trained(case, "--save", str(tmp_path / "stopped"), "--exit-interval", str(case.stop))
    rest = trained(case, "--load", str(tmp_path / "stopped"), "--save", str(tmp_path / "rest"))
    assert facts(rest) == facts(whole[case.stop :])
    (want, counted), (got, again) = (saved(tmp_path / folder) for folder in ("whole", "rest"))
    assert again == counted
    assert got.keys() == want.keys()
    assert [key for key, value in want.items() if not torch.equal(got[key], value)] == []
