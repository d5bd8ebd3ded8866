"""Pipelines in whole runs: evaluation, checkpoints across stages, exports, fp16, ramps of the batch size."""

from __future__ import annotations

import pytest

from tests.support.training import run

FP64 = ("--dtype", "fp64", "--attention-dropout", "0", "--hidden-dropout", "0")
FOUR = ("--num-layers", "4")
EVALUATED = ("--eval-interval", "3", "--eval-iters", "2")
LAYOUTS = {
    "1f1b": (2, ("--pp-degree", "2")),
    "gpipe x sharding": (4, ("--pp-degree", "2", "--pp-schedule", "gpipe", "--sharding-stage", "2")),
    "interleaved": (2, ("--pp-degree", "2", "--pp-schedule", "interleaved", "--vpp-degree", "2")),
    "ZBV": (2, ("--pp-degree", "2", "--pp-schedule", "zero_bubble", "--vpp-degree", "2")),
    "4 stages": (4, ("--pp-degree", "4", "--pp-seg-method", "balanced")),
}


@pytest.mark.parametrize("kind", ["moe", "ernie"])
def test_evaluation_and_reports_are_those_of_one_process(kind: str) -> None:
    """Also where the held-out samples leave some data ranks without a micro-batch."""
    flags = (*FP64, *FOUR, *EVALUATED, "--train-iters", "3", "--micro-batch-size", "2", "--global-batch-size", "16")
    want = run(1, kind, *flags)
    for name, (world_size, layout) in LAYOUTS.items():
        got = run(world_size, kind, *flags, *layout)
        assert got.evaluation == pytest.approx(want.evaluation, rel=1e-10), name
        for mine, theirs in zip(got.records, want.records, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-9), name
            assert mine.lm_loss == pytest.approx(theirs.lm_loss, rel=1e-9)
            assert mine.aux_loss == (None if kind == "ernie" else pytest.approx(theirs.aux_loss, rel=1e-9))
            assert mine.expert_load == theirs.expert_load
            assert mine.dropped_tokens == theirs.dropped_tokens


def test_waits_for_other_stages_are_in_the_record() -> None:
    """Those of an evaluation are not: it belongs to no step."""
    record = run(2, "ernie", *EVALUATED, "--pp-degree", "2", "--train-iters", "4").records[-1]
    waited = record.exposed_seconds
    assert waited["pp/receive"] > 0
    assert sum(waited.values()) == pytest.approx(record.exposed_communication_seconds)
    assert sum(waited.values()) <= record.iteration_seconds


def test_fp16_scales_the_loss_of_every_stage() -> None:
    """The auxiliary losses of the first stage are scaled as the head's losses are, or its gradients would be off."""
    flags = (*FOUR, "--dtype", "fp16", "--initial-loss-scale", "256", "--moe-aux-loss-coeff", "1.0")
    want, got = run(1, "moe", *flags), run(2, "moe", *flags, *LAYOUTS["1f1b"][1])
    for mine, theirs in zip(want.records, got.records, strict=True):
        assert mine.skipped == theirs.skipped
        assert mine.loss_scale == theirs.loss_scale
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=0.02)


def test_a_step_whose_gradients_overflow_is_skipped_on_all_stages() -> None:
    flags = ("--dtype", "fp16", "--initial-loss-scale", str(2.0**32), "--hysteresis", "1")
    got = run(2, "ernie", *flags, "--pp-degree", "2")
    assert got.records[0].skipped
    assert got.records[-1].loss_scale < 2.0**32


def test_the_number_of_micro_batches_may_grow() -> None:
    flags = (*FP64, "--rampup-batch-size", "4", "2", "12")
    want, got = run(1, "moe", *flags), run(2, "moe", *flags, "--pp-degree", "2")
    for outcome in (want, got):  # by 4, 6 and 8 samples
        assert [record.consumed_samples for record in outcome.records] == [4, 8, 14, 22, 30, 38]
    for mine, theirs in zip(got.records, want.records, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-10)
