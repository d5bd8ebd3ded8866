"""A stage's time: chains of layers, recomputed units, inputs that are kept elsewhere, deferred weight gradients."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megapar.planning import stage_time
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.stage_time import StagePrograms, StageTime
from tests.planning.test_program import run_of

DEEP = ("--num-layers", "12", "--num-experts", "8", "--ep-degree", "4", "--hidden-size", "1024", "--seq-length", "4096")


def time_of(run: PlannedRun, stage: int = 0) -> StageTime:
    return StagePrograms(run, OperatorTime(run)).stage(stage)


@pytest.mark.parametrize("more", [(), ("--first-k-dense", "2"), ("--recompute-interval", "1")])
def test_a_chain_takes_as_long_as_if_all_of_its_layers_were_run(more: tuple[str, ...]) -> None:
    run = run_of(*DEEP, *more, "--ampipe-degree", "2", "--ampipe-cross-layer")
    short = time_of(run)
    with patch.object(stage_time, "SIMULATED", 100):
        whole = time_of(run)
    assert short.both == pytest.approx(whole.both)
    assert short.exposed == pytest.approx(whole.exposed)
    assert short.backward.busy == pytest.approx(whole.backward.busy)


def test_a_recomputation_sends_all_but_the_last_combine_again() -> None:
    kept, again = (
        time_of(run_of(*DEEP, "--ampipe-degree", "2", *more)) for more in ((), ("--recompute-interval", "1"))
    )
    assert again.forward == kept.forward
    sent = again.backward.busy[0] - kept.backward.busy[0]
    assert 0.5 * kept.forward.busy[0] < sent < 0.6 * kept.forward.busy[0]


def test_offloaded_and_divided_inputs_take_their_links() -> None:
    flags = ("--num-experts", "0", "--num-layers", "8", "--mp-degree", "2", "--recompute-interval", "1")
    plain, offload, partition = (
        time_of(run_of(*flags, *more)) for more in ((), ("--recompute-offload",), ("--recompute-partition",))
    )
    assert offload.forward.busy[2] > 0 < offload.backward.busy[3]
    assert partition.backward.busy[0] > plain.backward.busy[0]
    assert len({plain.both, offload.both, partition.both}) == 3


def test_a_schedule_that_defers_weight_gradients_runs_them_apart() -> None:
    flags = ("--num-experts", "0", "--num-layers", "8", "--pp-degree", "2", "--gradient-merge-acc-step", "8")
    whole, apart = (time_of(run_of(*flags, "--pp-schedule", name), 1) for name in ("1f1b", "zero_bubble"))
    assert apart.weight > 0 == whole.weight
    assert apart.backward.seconds < whole.backward.seconds
