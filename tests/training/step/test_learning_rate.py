"""A checkpoint's learning-rate schedule against the run's: what differs, and what to do, by the names of flags."""

from __future__ import annotations

from dataclasses import replace

from megapar.training.step.learning_rate import another_schedule
from megapar.training.step.schedules import LearningRate

COSINE = LearningRate(peak=1.0, floor=0.1, style="cosine", warmup_iters=2, decay_iters=10, wsd_decay_iters=1)


def test_a_checkpoint_from_before_the_shapes_was_linear() -> None:
    now = LearningRate(1.0, 0.0, "wsd", 2, 10, wsd_decay_iters=4).to_dict()
    old = {name: value for name, value in now.items() if name != "wsd_decay_style"}
    assert another_schedule(old, now) is None
    found = another_schedule(old, {**now, "wsd_decay_style": "cosine"})
    assert found is not None
    assert found[0] == "--lr-wsd-decay-style is linear there and cosine here"
    assert another_schedule({**old, "peak": 2.0}, now) == (
        "--lr is 2.0 there and 1.0 here",
        "Pass the same flags, or --override-opt-param-scheduler to continue with the new ones.",
    )


def test_more_steps_name_the_flag_that_keeps_the_schedule() -> None:
    """--train-iters moves the ends of decay and wsd; a cosine run hears nothing of wsd."""
    longer = replace(COSINE, decay_iters=20, wsd_decay_iters=2)
    found = another_schedule(COSINE.to_dict(), longer.to_dict())
    assert found is not None
    assert found[0] == "--lr-decay-iters is 10 there and 20 here"
    assert "Pass --lr-decay-iters 10 to keep the schedule" in found[1]
    wsd = another_schedule(replace(COSINE, style="wsd").to_dict(), replace(longer, style="wsd").to_dict())
    assert wsd is not None
    assert "Pass --lr-decay-iters 10 --lr-wsd-decay-iters 1 to keep the schedule" in wsd[1]


def test_a_constant_rate_has_no_end_that_could_differ() -> None:
    constant = replace(COSINE, style="constant")
    assert another_schedule(constant.to_dict(), replace(constant, decay_iters=20, floor=0.0).to_dict()) is None
    assert another_schedule(constant.to_dict(), replace(constant, peak=2.0).to_dict()) is not None
    assert another_schedule(constant.to_dict(), COSINE.to_dict()) is not None
