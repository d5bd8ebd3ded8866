"""Rows of a dispatch: how many, by hand, and how wide."""

from __future__ import annotations

import pytest

from megapar.moe.row_counts import ExpertRows, dispatched_rows, row_columns
from megapar.moe.sizes import DEEPSPEED_MOE, MEGATRON_MOE, MoeSizes


def sizes(kind: str) -> MoeSizes:
    return MoeSizes(16, 32, num_experts=8, topk=2, kind=kind, capacity_factor=1.0, min_capacity=1)


@pytest.mark.parametrize(
    ("kind", "even", "rows"),
    [
        (MEGATRON_MOE, False, 64),  # two choices of 32 positions
        (DEEPSPEED_MOE, False, 32),  # 16 tokens share capacities of 4
        (DEEPSPEED_MOE, True, 32),
    ],
)
def test_a_capacity_bounds_the_rows_of_a_rank(kind: str, even: bool, rows: int) -> None:
    assert dispatched_rows(sizes(kind), 32, 16, even=even) == rows


def test_even_splits_are_padded_to_the_capacity() -> None:
    assert dispatched_rows(sizes(DEEPSPEED_MOE), 1, 16, even=True) == 32
    assert dispatched_rows(sizes(DEEPSPEED_MOE), 1, 16, even=False) == 2


@pytest.mark.parametrize(
    ("ep", "gathered", "rows"),
    [
        (1, 1, ExpertRows(64, 64, 64)),
        (4, 1, ExpertRows(64, 64, 256)),
        (8, 1, ExpertRows(64, 64, 256)),  # one expert here: a token comes once
        (2, 4, ExpertRows(64, 256, 512)),  # four ranks gather one another's rows
    ],
)
def test_rows_that_the_experts_of_a_rank_multiply(ep: int, gathered: int, rows: ExpertRows) -> None:
    assert ExpertRows.of(sizes(MEGATRON_MOE), 32, ep, gathered, even=False) == rows


def test_a_row_has_room_for_its_weight_and_is_whole_in_sixteen_bytes() -> None:
    assert row_columns(16, 4, 2) == 24
    assert row_columns(16, 4, 4) == 20
    assert row_columns(16, 8, 8) == 18
