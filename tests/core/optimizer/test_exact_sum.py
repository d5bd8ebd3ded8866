"""Sums of any order and grouping have the same bits."""

from __future__ import annotations

import math

import pytest
import torch

from megapar.core.optimizer.exact_sum import UNITS, parts, total


@pytest.mark.parametrize("seed", range(3))
def test_order_and_grouping_change_no_bit(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    terms = torch.randn(999, generator=draw, dtype=torch.float64).square()
    terms *= 10.0 ** torch.randint(-20, 8, (999,), generator=draw).double()
    whole = total(parts(terms))
    shuffled = terms[torch.randperm(999, generator=draw)]
    assert torch.equal(total(parts(shuffled)), whole)
    assert torch.equal(total(parts(shuffled[:100]) + parts(shuffled[100:])), whole)
    assert whole.item() == pytest.approx(math.fsum(terms.tolist()), rel=1e-15)


def test_it_takes_all_that_fp32_squares_can_be() -> None:
    terms = torch.tensor([1e38, 1e-38, 3e-46, 0.0], dtype=torch.float64).square()
    assert total(parts(terms[1:])).item() == pytest.approx(1e-76, rel=1e-1)
    assert total(parts(terms[:1])).item() == terms[0].item()
    assert UNITS[-1] < 1e-76


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.inf, math.nan):
        assert not torch.isfinite(total(parts(torch.tensor([1.0, bad], dtype=torch.float64))))
