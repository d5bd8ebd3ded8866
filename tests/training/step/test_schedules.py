"""Learning rate and batch size over progress, and how a checkpoint's schedule differs from a run's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megapar.schema.batch_size import BatchSize
from megapar.training.step.schedules import LearningRate, WeightDecay, another_schedule


def test_warm_up_reaches_the_peak_with_its_last_step() -> None:
    rate = LearningRate(peak=1.0, floor=0.1, style="cosine", warmup_iters=4, decay_iters=12)
    assert [rate.at(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate.at(4) == 1.0
    assert rate.at(8) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rate.at(12) == rate.at(1000) == 0.1


def test_linear_and_constant() -> None:
    linear = LearningRate(peak=2.0, floor=0.0, style="linear", warmup_iters=0, decay_iters=4)
    assert [linear.at(i) for i in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]
    constant = LearningRate(peak=2.0, floor=0.0, style="constant", warmup_iters=1, decay_iters=4)
    assert constant.at(100) == 2.0


def test_wsd_is_stable_then_linear() -> None:
    wsd = LearningRate(peak=1.0, floor=0.0, style="wsd", warmup_iters=2, decay_iters=10, wsd_decay_iters=4)
    assert {wsd.at(i) for i in range(2, 7)} == {1.0}
    assert [wsd.at(i) for i in range(6, 11)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_batch_ramps_in_increments() -> None:
    batch = BatchSize(final=32, start=8, increment=8, ramp_samples=300)
    assert [batch.at(n) for n in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [8, 8, 16, 16, 24, 24, 32, 32]
    assert BatchSize(16).at(0) == 16


def test_a_phase_goes_from_the_rate_at_its_beginning_to_its_own() -> None:
    base = LearningRate(peak=1.0, floor=0.0, style="linear", warmup_iters=0, decay_iters=100)
    targets = ((20, 40, 0.4, "linear"), (40, 60, 0.1, "cosine"), (80, 90, 0.5, "constant"))
    rate = replace(base, targets=targets)
    assert [rate.at(i) for i in (0, 19, 60, 79, 90)] == [base.at(i) for i in (0, 19, 60, 79, 90)]
    assert rate.at(20) == base.at(20) == 0.8
    assert rate.at(30) == pytest.approx(0.6, rel=1e-15)
    assert rate.at(40) == pytest.approx(0.4, rel=1e-15)  # the end of the phase before it, not the schedule's 0.6
    assert rate.at(50) == pytest.approx(0.25, rel=1e-15)
    assert {rate.at(i) for i in range(80, 90)} == {0.5}
    # Two updates were skipped: phases begin with their data, and the schedule between them goes on by updates.
    assert [rate.at(18, 20), rate.at(28, 30), rate.at(38, 40)] == [rate.at(20), rate.at(30), rate.at(40)]
    assert rate.at(58, 60) == base.at(58)


def test_only_phases_that_have_begun_are_the_schedule_of_a_checkpoint() -> None:
    base = LearningRate(peak=1.0, floor=0.0, style="constant", warmup_iters=0, decay_iters=100)
    planned = replace(base, targets=((20, 40, 0.4, "linear"),))
    assert "targets" not in base.to_dict()
    assert another_schedule(base.to_dict(), planned.to_dict(), 20) is None
    assert another_schedule(planned.to_dict(), base.to_dict(), 20) is None
    assert another_schedule(planned.to_dict(), planned.to_dict(), 30) is None
    longer = replace(base, targets=((20, 60, 0.4, "linear"),))
    changed = another_schedule(planned.to_dict(), longer.to_dict(), 21)
    assert changed is not None
    assert changed[0] == "the lr of the phases so far is 20-40 to 0.4 linear there and 20-60 to 0.4 linear here"
    assert another_schedule(planned.to_dict(), longer.to_dict(), 20) is None
    assert another_schedule({**planned.to_dict(), "targets": "nonsense"}, planned.to_dict(), 30) is not None


def decayed(style: str, share: float) -> float:
    """Of a peak of 1 and a floor of 0.1, at a share of the last 40 of 100 steps."""
    rate = LearningRate(1.0, 0.1, "wsd", warmup_iters=10, decay_iters=100, wsd_decay_iters=40, wsd_decay_style=style)
    return rate.at(60 + round(40 * share))


@pytest.mark.parametrize(
    ("style", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", 0.5 * (1 + math.sqrt(0.5)), 0.5),
        ("exponential", 2 ** (3 / 4) - 1, math.sqrt(2) - 1),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_the_final_decay_has_megatrons_shapes(style: str, quarter: float, half: float) -> None:
    assert decayed(style, 0) == 1.0
    assert decayed(style, 0.25) == pytest.approx(0.1 + 0.9 * quarter, rel=1e-15)
    assert decayed(style, 0.5) == pytest.approx(0.1 + 0.9 * half, rel=1e-15)
    assert decayed(style, 1) == 0.1


def test_ernie_4_5_is_steady_until_the_step_its_recipe_names() -> None:
    """``wsd:231084`` with ``1-sqrt``: the number ends the steady phase, and the decay the run."""
    rate = LearningRate(2.2e-4, 2.2e-5, "wsd", 200, 256760, wsd_decay_iters=25676, wsd_decay_style="minus_sqrt")
    assert rate.at(231083) == rate.at(231084) == 2.2e-4 > rate.at(231085)
    step = 250_000
    theirs = (1 - math.sqrt((step - 231084) / (256760 - 231084))) * (1 - 0.1) + 0.1
    assert rate.at(step) == pytest.approx(2.2e-4 * theirs, rel=1e-14)


def test_constant_then_cosine_then_constant() -> None:
    """DeepSeek-V3: the cosine begins where the constant ends, and what follows the decay has the floor."""
    rate = LearningRate(2.2e-4, 2.2e-5, "wsd", 2000, 230_000, wsd_decay_iters=70_000, wsd_decay_style="cosine")
    assert rate.at(2000) == rate.at(160_000) == 2.2e-4
    assert rate.at(195_000) == pytest.approx((2.2e-4 + 2.2e-5) / 2, rel=1e-14)
    assert rate.at(230_000) == rate.at(500_000) == 2.2e-5


def test_inverse_square_root_falls_from_the_end_of_the_warm_up() -> None:
    rate = LearningRate(peak=1.0, floor=0.2, style="inverse-square-root", warmup_iters=4, decay_iters=64)
    assert rate.at(3) == rate.at(4) == 1.0
    assert rate.at(16) == 0.5
    assert rate.at(64) == 0.25  # above the floor until the decay ends
    assert rate.at(65) == 0.2
    assert LearningRate(1.0, 0.0, "inverse-square-root", warmup_iters=0, decay_iters=64).at(16) == 0.25
    low = LearningRate(1.0, 0.5, "inverse-square-root", warmup_iters=1, decay_iters=64)
    assert low.at(16) == 0.5


COSINE = LearningRate(peak=1.0, floor=0.1, style="cosine", warmup_iters=2, decay_iters=10, wsd_decay_iters=1)


def test_a_checkpoint_from_before_the_shapes_was_linear() -> None:
    now = LearningRate(1.0, 0.0, "wsd", 2, 10, wsd_decay_iters=4).to_dict()
    old = {name: value for name, value in now.items() if name != "wsd_decay_style"}
    assert another_schedule(old, now) is None
    found = another_schedule(old, {**now, "wsd_decay_style": "cosine"})
    assert found[0] == "--lr-wsd-decay-style is linear there and cosine here"
    assert another_schedule({**old, "peak": 2.0}, now) == (
        "--lr is 2.0 there and 1.0 here",
        "Pass the same flags, or --override-opt-param-scheduler to continue with the new ones.",
    )


def test_more_steps_name_the_flag_that_keeps_the_schedule() -> None:
    """--train-iters moves the ends of decay and wsd; a cosine run hears nothing of wsd."""
    longer = replace(COSINE, decay_iters=20, wsd_decay_iters=2)
    found = another_schedule(COSINE.to_dict(), longer.to_dict())
    assert found[0] == "--lr-decay-iters is 10 there and 20 here (from --train-iters, if not given)"
    assert "Pass --lr-decay-iters 10 to keep the schedule" in found[1]
    wsd = another_schedule(replace(COSINE, style="wsd").to_dict(), replace(longer, style="wsd").to_dict())
    assert "Pass --lr-decay-iters 10 --lr-wsd-decay-iters 1 to keep the schedule" in wsd[1]


def test_a_constant_rate_has_no_end_that_could_differ() -> None:
    constant = replace(COSINE, style="constant")
    assert another_schedule(constant.to_dict(), replace(constant, decay_iters=20, floor=0.0).to_dict()) is None
    assert another_schedule(constant.to_dict(), replace(constant, peak=2.0).to_dict()) is not None
    assert another_schedule(constant.to_dict(), COSINE.to_dict()) is not None


def test_decoupled_rates_have_the_shape_of_the_others() -> None:
    rate = replace(COSINE, decoupled_peak=4.0)
    apart = rate.decoupled()
    assert apart is not None
    assert (apart.at(0), apart.at(1), apart.at(10)) == (2.0, 4.0, 0.1)
    assert replace(rate, decoupled_floor=0.5).decoupled().at(10) == 0.5
    assert COSINE.decoupled() is None
    assert "--decoupled-lr is None there and 4.0 here" in another_schedule(COSINE.to_dict(), rate.to_dict())[0]


def test_weight_decay_goes_from_its_first_value_to_its_last() -> None:
    """As Megatron-LM's scheduler, whose first step has the start."""
    linear, cosine = (WeightDecay(0.1, 0.3, style, 8) for style in ("linear", "cosine"))
    assert [linear.at(step) for step in (0, 2, 8, 9)] == pytest.approx([0.1, 0.15, 0.3, 0.3])
    wanted = [0.1 + 0.2 * 0.5 * (math.cos(math.pi * (1 - step / 8)) + 1) for step in range(9)]
    assert [cosine.at(step) for step in range(9)] == pytest.approx(wanted)


def test_another_course_of_weight_decay_is_named() -> None:
    rate = COSINE.to_dict()
    now = {**rate, **WeightDecay(0.1, 0.3, "linear", 8).to_dict()}
    assert another_schedule(now, now) is None
    assert "--weight-decay-incr-style is linear there and constant here" in another_schedule(now, rate)[0]
    longer = {**rate, **WeightDecay(0.1, 0.3, "linear", 9).to_dict()}
    differences, fix = another_schedule(now, longer)
    assert differences == "--train-iters is 8 there and 9 here"
    assert fix.startswith("Pass --override-opt-param-scheduler to stretch the increase")
