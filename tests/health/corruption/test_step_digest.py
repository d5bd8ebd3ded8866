"""Digests see every change of bits that a wrong product makes; trails say where two runs part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megapar.health.corruption.step_digest import (
    BACKWARD,
    FORWARD,
    REDUCED,
    DigestPoint,
    DigestRecord,
    StepDigest,
    digest,
    first_difference,
)

SIZES = (0, 1, 3, 4, 7, 8, 9, 100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", SIZES)
def test_one_bit_anywhere_is_seen(dtype: torch.dtype, size: int) -> None:
    x = torch.arange(1, size + 1).to(dtype)
    before = digest(x).item()
    for number in range(size):
        other = x.clone()
        view = other.view(torch.uint8) if dtype != torch.bool else other.byte()
        at = number * x.element_size()
        view[at] = view[at] ^ 1
        assert digest(view.bool() if dtype == torch.bool else other).item() != before


def test_signs_that_are_wrong_in_two_places_are_seen() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert digest(x * torch.tensor([-1, -1, 1])).item() != digest(x).item()


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_equal_bits_give_equal_digests_wherever_they_lie(start: int) -> None:
    x = torch.randn(40, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    moved = torch.zeros(50, dtype=torch.bfloat16)[start : start + 40].copy_(x)
    assert digest(moved).item() == digest(x).item()
    assert digest(x.view(5, 8).t()).item() == digest(x.view(5, 8).t().contiguous()).item()


def test_the_earliest_place_is_the_forward_s_first_unit_or_the_backward_s_last() -> None:
    step_digest = StepDigest(["embedding", "layers.0", "layers.0", "layers.1"])
    one = torch.ones(2)
    for unit in ("embedding", "layers.0", "layers.1"):
        step_digest.output(unit, ((one,), "no tensor", (one, "statistics")))
    step_digest.sums("the loss", one)
    for unit in ("layers.1", "layers.0"):
        step_digest.gradient(unit, f"{unit}.weight", one)
    step_digest.reduced(one)
    trace = step_digest.end()
    assert len(trace.points) == 7
    assert [point.phase for point in trace.points] == [FORWARD] * 4 + [BACKWARD] * 2 + [REDUCED]

    def changed(*numbers: int) -> DigestPoint | None:
        digests = [value + (number in numbers) for number, value in enumerate(trace.digests)]
        return first_difference(trace, trace._replace(digests=tuple(digests)))

    assert changed() is None
    assert changed(2, 3, 4) == trace.points[2]
    assert changed(4, 5, 6) == trace.points[4]
    assert trace.points[4].name == "the gradient of layers.1.weight"
    assert len(trace.local().points) == 6
    assert trace.hash() != trace.local().hash()


def test_runs_that_do_not_do_the_same_differ() -> None:
    points = DigestPoint(FORWARD, 0, "a"), DigestPoint(FORWARD, 1, "b")
    found = first_difference(DigestRecord(points, (1, 2)), DigestRecord(points[:1], (1,)))
    assert found is not None
    assert found.name == "the order of work at b"


def test_outputs_of_units_are_noted_while_they_are_watched() -> None:
    layer, step_digest = nn.Linear(2, 2), StepDigest(["layers.0"])
    with step_digest.watching({"layers.0": (layer,)}):
        layer(torch.ones(1, 2))
    layer(torch.ones(1, 2))
    assert [point.name for point in step_digest.end().points] == ["the output of layers.0"]


def test_a_head_beside_the_copy_of_an_embedding_is_the_head() -> None:
    """The last stage of a pipeline has the tied weight, and names it by the unit that runs first on another stage."""
    layer, head = nn.Linear(2, 2), nn.Linear(2, 2)
    step_digest = StepDigest(["embedding", "layers.0", "head"])
    with step_digest.watching({"embedding": (head,), "layers.0": (layer,), "head": (head,)}):
        head(layer(torch.ones(1, 2)))
    assert [point.name for point in step_digest.end().points] == ["the output of layers.0", "the output of head"]


def test_an_earlier_difference_counts_before_a_part_that_is_missing() -> None:
    a, b, c = (DigestPoint(FORWARD, number, name) for number, name in enumerate("abc"))
    short, long = DigestRecord((a, b), (1, 2)), DigestRecord((a, b, c), (1, 2, 3))
    for pair in ((short, long), (long, short)):
        found = first_difference(*pair)
        assert found is not None
        assert found.name == "the order of work at c"
    assert first_difference(short, DigestRecord((a, c), (9, 2))) == a
