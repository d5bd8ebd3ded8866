"""Masters and moments that change between two updates: every rank hears of it, and a sound run does not notice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megapar.arguments import parse
from megapar.errors import CorruptionError
from megapar.health.corruption import state_guard
from megapar.trainer import Trainer, train
from megapar.training.reports.terminal import PlainTerminal
from megapar.training.step.step_guard import StepGuard
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins, make_trainer

LAYOUTS = {
    "sharding 2": (2, ("--sharding-degree", "2")),
    "offloaded": (2, ("--sharding-degree", "2", "--optimizer-offload")),
    "stage 3": (2, ("--sharding-degree", "2", "--sharding-stage", "3")),
    "stage 3, ep 2": (2, ("--sharding-degree", "2", "--sharding-stage", "3", "--ep-degree", "2")),
    "pp 2": (2, ("--pp-degree", "2")),
    "mp 2, sp": (2, ("--mp-degree", "2", "--sequence-parallel")),
}
KINDS = ("master", "exp_avg", "exp_avg_sq")
ALL = ("--state-digest-steps", "1")


def faulty(
    rank: int,
    world_size: int,
    rendezvous: str,
    flags: Sequence[str],
    kind: str = "",
    on_device: bool = False,
    at: int = 3,
) -> tuple[list[float], list[str], tuple[str, tuple[int, ...], tuple[str, ...]] | None]:
    """Losses, what was said, and what the run ended with: one bit of the last rank's state flips behind a step.

    kind: of state; "" none. on_device: steps are decided as on an accelerator.
    """
    printed: list[str] = []
    line = last_wins((*SMALL["moe"], *COMMON), ("--dtype", "fp32", *flags))
    with (
        patch.object(PlainTerminal, "print_message", lambda self, text: printed.append(text)),
        patch.object(Trainer, "step", flipping(kind, at)),
        patch.object(StepGuard, "_may_decide_on_device", lambda self, config: on_device),
    ):
        try:
            outcome = train(parse("moe", line, dict(os.environ)), f"file://{rendezvous}", keep_records=True)
        except CorruptionError as error:
            return [], printed, (str(error), error.ranks, error.parameters)
    return [record.loss for record in outcome.records], printed, None


def flipping(kind: str, at: int) -> Any:
    step = Trainer.step

    def call(self: Trainer) -> Any:
        done = step(self)
        if kind and self.world.rank == self.world.axis("world").size - 1 and self.progress.iteration == at:
            shards, optimizer = self.job.sharding.master_shards, self.job.optimizer
            tensors = [shard.master for shard in shards] if kind == "master" else optimizer.state(kind)
            with torch.no_grad():
                tensors[-1].view(-1).view(torch.int32)[0] ^= 1 << 3
        return done

    return call


@pytest.mark.parametrize(
    "layout",
    [*list(LAYOUTS)[:3], *(pytest.param(name, marks=pytest.mark.table) for name in list(LAYOUTS)[3:])],
)
def test_a_sound_run_is_the_same_with_it(layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    flags = (*flags, "--log-start", "full")
    want = run_ranks(world_size, faulty, (*flags, "--state-digest-steps", "0"), group=False)[0]
    for steps in ("2", "auto"):
        found, printed, error = run_ranks(world_size, faulty, (*flags, "--state-digest-steps", steps), group=False)[0]
        assert error is None
        assert found == want[0]
        lines = [line for line in printed if line.startswith("masters and moments: all compared ")]
        assert len(lines) == 1
        assert "within 2 steps" in lines[0] or steps == "auto"


@pytest.mark.parametrize(
    ("layout", "kind", "on_device"),
    [(layout, KINDS[i % 3], i % 2 == 1) for i, layout in enumerate([*LAYOUTS, "sharding 2", "offloaded", "stage 3"])],
)
def test_a_flipped_bit_is_named_on_every_rank(layout: str, kind: str, on_device: bool) -> None:
    world_size, flags = LAYOUTS[layout]
    errors = {found[2] for found in run_ranks(world_size, faulty, (*flags, *ALL), kind, on_device, group=False)}
    (error,) = errors
    assert error is not None
    message, ranks, parameters = error
    assert ranks == (world_size - 1,)
    assert "masters or moments changed between two updates, on rank 1 (" in message
    assert "cpu" in message
    assert parameters
    assert all(name.startswith(f"{kind} of ") for name in parameters)
    # The host hears of it in the next step, or one later; what lies in host memory, when it is brought.
    assert int(message.split()[1].rstrip(":")) <= 3 + on_device + (layout == "offloaded")


def test_nothing_is_saved_after_it(tmp_path: Path) -> None:
    """Of what changes behind the last step before a save the next check knows, too."""
    flags = ("--sharding-degree", "2", *ALL, "--save", str(tmp_path), "--save-interval", "1", "--no-async-save")
    found = run_ranks(2, faulty, flags, "exp_avg", False, 3, group=False)[0]
    assert found[2] is not None
    assert (tmp_path / "latest").read_text().split()[0] == "iter_0000002"


def test_a_skipped_step_keeps_what_is_held(tmp_path: Path) -> None:
    """An overflow changes nothing; the state is compared all the same."""
    flags = ("--sharding-degree", "2", *ALL, "--dtype", "fp16", "--initial-loss-scale", str(2.0**40))
    assert run_ranks(2, faulty, flags, group=False)[0][2] is None
    found = run_ranks(2, faulty, (*flags, "--train-iters", "40"), "master", False, 39, group=False)[0][2]
    assert found is not None


def test_as_many_steps_as_keep_it_below_its_share() -> None:
    printed = run_ranks(2, faulty, ("--sharding-degree", "2", "--log-start", "full"), group=False)[0][1]
    lines = [line for line in printed if line.startswith("masters and moments")]
    assert lines[0] == "masters and moments: comparison starts after a few steps, and takes at most 1% of a step"
    assert len(lines) == 2


def test_a_short_log_leaves_its_coverage_out() -> None:
    (last,) = run_ranks(2, faulty, ("--sharding-degree", "2"), group=False)[0][1]
    assert last.startswith("iteration 6/6 ")


def test_what_is_said_of_the_coverage() -> None:
    assert "before the next update" in state_guard.coverage(1, 1)
    assert "all compared within 8 steps, a part in each" in state_guard.coverage(8, 8)
    assert "all compared within 8 steps, in 1 of them" in state_guard.coverage(8, 1)
    assert "a probability of 1 in 8" in state_guard.coverage(8, 1)


def test_steps_that_change_nothing_are_none_of_a_turn() -> None:
    """The second half is digested after iteration 2; what 3 and 4 skip vouches for nothing."""
    line = last_wins((*SMALL["moe"], *COMMON), ("--dtype", "fp32", "--state-digest-steps", "2"))
    trainer = make_trainer("moe", line)
    with closing(trainer.loader):
        (guard,) = [one for one in trainer.guards._guards if isinstance(one, state_guard.StateGuard)]
        assert guard.verified_up_to(0) == 0
        for iteration in (1, 2):
            guard.after_update(iteration)
        assert [guard.verified_up_to(at) for at in (2, 4)] == [1, 1]
        guard.after_update(5)
        assert guard.verified_up_to(5) == 2
    trainer.world.close()
