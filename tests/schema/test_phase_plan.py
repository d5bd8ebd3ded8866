"""Phases as they are written, and their places in steps, samples and positions, by a walk over every step."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from megapar.schema.batch_size import BatchSize
from megapar.schema.phase_plan import PhasePlan, RateTarget, amount, parse_phases, phases_text, plan_phases

PLAN = "0: web=3,code=1; 10B tokens: web=1,math=0.5 seq-length=8192 global-batch-size=512 lr=1e-6:cosine"


def test_numbers_have_suffixes() -> None:
    assert [amount(text) for text in ("0", "300", "1.5k", "2K", "10M", "10B", "0.25T", "1.5e3")] == [
        *(0, 300, 1500, 2000, 10**7, 10**10, 25 * 10**10, 1500)
    ]
    for text in ("", "k", "1.5", "-1", "1G", "0.0001k"):
        with pytest.raises(ValueError, match="whole number"):
            amount(text)


def test_yaml_and_a_line_write_the_same() -> None:
    first, second = parse_phases(PLAN)
    assert (first.at, first.weights, first.seq_length, first.batch, first.rate) == (
        *(0, (("code", Fraction(1)), ("web", Fraction(3)))),
        *(None, None, None),
    )
    assert (second.at, second.unit, second.place) == (10**10, "tokens", "10,000,000,000 tokens")
    assert second.weights == (("math", Fraction(1, 2)), ("web", Fraction(1)))
    assert (second.seq_length, second.batch, second.rate) == (8192, 512, RateTarget(1e-6, "cosine"))
    listed: list[dict[str, Any]] = [
        {"at": "0", "unit": "tokens", "sources": {"web": "3", "code": "1"}},
        {
            **{"at": "10B", "unit": "tokens", "sources": {"web": "1", "math": 0.5}, "seq_length": "8192"},
            **{"global_batch_size": "512", "lr": {"to": 1e-6, "style": "cosine"}},
        },
    ]
    assert parse_phases(phases_text(listed))[1] == second
    assert parse_phases(phases_text("0: b=1,a=1;"))[0] == parse_phases("0: a=1.0 b=1")[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a=1", "does not begin with a place"),
        ("0: a=1; 5: a=2", "does not begin with a place"),
        ("0: a=1; 5 epochs: a=2", "does not begin with a place"),
        ("5 samples: a=1", "the first phase begins at 0"),
        ("0: a=1; 9 samples: a=2; 9 samples: a=1", "does not begin after the one before it"),
        ("0: a=1,a=2", "has a twice"),
        ("0: seq-length=8", "has no source"),
        ("0: a=0", "neither NAME=WEIGHT"),
        ("0: a b=1", "neither NAME=WEIGHT"),
        ("0: a=1 seq-length=0", "at least 1"),
        ("0: a=1 lr=nan", "is not lr=RATE"),
        ("0: a=1 lr=0.1:steep", "is not lr=RATE"),
        ([{"at": 0, "sources": {"a": 1}, "batch": 3}], "phase 1 has the unknown key batch"),
        ([{"at": 0}], "phase 1 needs sources"),
        (["0: a=1"], "phase 1 is not a mapping"),
        ([{"at": 0, "sources": {"a": 1}, "lr": {"from": 1}}], "the keys to and style"),
    ],
)
def test_what_is_not_of_the_form_is_named(text: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        phases_text(text)


def walked(plan: PhasePlan, steps: int) -> list[tuple[int, int, int, int]]:
    """The phase, samples, positions and batch of each step, one after the other."""
    rows, samples, positions = [], 0, 0
    for _ in range(steps):
        span = plan.at(samples)
        batch = span.batch.at(samples)
        rows.append((plan.spans.index(span), samples, positions, batch))
        samples, positions = samples + batch, positions + batch * span.seq_length
    return rows


def test_a_phase_begins_with_the_first_step_at_or_after_its_place() -> None:
    draw = random.Random(1)
    for _ in range(200):
        ramp = (draw.choice((2, 4)), 2, draw.randrange(1, 40)) if draw.random() < 0.4 else ()
        text, at = "0: a=1", {"iterations": 0, "samples": 0, "tokens": 0}
        for _ in range(draw.randrange(4)):
            unit = draw.choice(tuple(at))
            at[unit] += draw.randrange(1, {"iterations": 6, "samples": 90, "tokens": 900}[unit])
            text += f"; {at[unit]} {unit}: a=1"
            text += f" seq-length={draw.randrange(1, 30)}" * draw.randrange(2)
            text += f" global-batch-size={draw.choice((3, 8))}" * draw.randrange(2)
        try:
            phases = parse_phases(text)
            plan = plan_phases(phases, 16, BatchSize(8, *ramp))
        except ValueError:
            continue  # a phase without a step, or inside the ramp
        rows = walked(plan, 60)
        for step, (number, samples, positions, batch) in enumerate(rows):
            here = plan.after(step)
            assert (here.first_step, here.first_sample, here.first_position) == (step, samples, positions)
            assert here.batch.at(samples) == batch
            measured = {"iterations": step, "samples": samples, "tokens": positions}
            begun = [n for n, phase in enumerate(phases) if measured[phase.unit] >= phase.at]
            assert number == max(begun), text
        ends = [(span.first_step, end.first_step) for span, end in plan.until(60)]
        assert ends[0][0] == 0
        assert ends[-1][1] == 60
        assert all(end == begin for (_, end), (begin, _) in pairwise(ends))


def test_phases_without_a_place_are_refused() -> None:
    batch = BatchSize(8, 2, 2, 40)
    with pytest.raises(ValueError, match="no step is left before the phase at 3 samples"):
        plan_phases(parse_phases("0: a=1; 1 iterations: a=2; 3 samples: a=1"), 16, BatchSize(4))
    with pytest.raises(ValueError, match="inside the ramp"):
        plan_phases(parse_phases("0: a=1; 20 samples: a=2"), 16, batch)
    with pytest.raises(ValueError, match="ends at --global-batch-size"):
        plan_phases(parse_phases("0: a=1 global-batch-size=4"), 16, batch)
    assert len(plan_phases(parse_phases("0: a=1; 40 samples: a=2"), 16, batch).spans) == 2
    (whole,) = plan_phases((), 16, batch).spans
    assert (whole.weights, whole.batch, whole.seq_length) == ((), batch, 16)
