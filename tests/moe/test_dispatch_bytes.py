"""Rows and bytes of both dispatches: by hand, over all choices of experts, and counted from a drawn routing."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from megapar.core.units import GIBIBYTE
from megapar.moe.dispatch_bytes import DispatchBytes, ExpertRows, dispatched_rows, node_row_bytes, row_columns
from megapar.moe.sizes import DEEPSPEED_MOE, MEGATRON_MOE, MoeSizes
from tests.support.sent_rows import plain_rows, rows_by_node


def layer(topk: int, experts: int, ep: int, node_ranks: int, **more: float | int) -> DispatchBytes:
    return DispatchBytes(8, topk, experts, ep, node_ranks, 2, 4, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("hidden", "topk", "item", "size"), [(2048, 8, 2, 4144), (5, 1, 2, 16), (5, 2, 4, 32)])
def test_a_row_has_a_slot_for_each_choice_and_whole_vectors(hidden: int, topk: int, item: int, size: int) -> None:
    assert node_row_bytes(hidden, topk, 4, item) == size


def test_a_step_of_qwen3_30b_on_two_nodes() -> None:
    """128 experts, top-8, 48 layers, 262,144 tokens a step on 16 ranks: 768 GiB of tokens by pairs, 191 by nodes."""
    moe = DispatchBytes(2048, 8, 128, 16, 8, 2, 4)
    scale = 48 * 16 / GIBIBYTE
    plain = sum(sent.between for sent in moe.plain(262144 / 16).values()) * scale
    by_node = sum(sent.between for sent in moe.by_node(262144 / 16).values()) * scale
    assert plain == pytest.approx(768 + 1.5)  # the weights, padded to 16 bytes, in two of the passes
    assert by_node == pytest.approx(192 * 0.9969041 * (1 + 48 / 4096 / 2), abs=1e-3)


@pytest.mark.parametrize(("topk", "experts", "ideal"), [(8, 16, 1.60), (4, 8, 1.34)])
def test_the_ideal_step_where_messages_between_nodes_are_half_of_it(topk: int, experts: int, ideal: float) -> None:
    moe = layer(topk, experts, 4, 2)
    assert 1 / (0.5 + 0.5 * moe.node_rows().between / moe.plain_rows().between) == pytest.approx(ideal, abs=0.005)


def chosen(experts: int, topk: int, groups: int, chosen_groups: int) -> list[tuple[int, ...]]:
    """Every set of experts that a token may choose, with as many entries as ways to choose it."""
    size = experts // groups
    pools = combinations(range(groups), chosen_groups)
    return [
        pair
        for pool in pools
        for pair in combinations([expert for expert in range(experts) if expert // size in pool], topk)
    ]


@pytest.mark.parametrize(
    ("topk", "experts", "ep", "node_ranks", "groups", "chosen_groups"),
    [(2, 8, 4, 2, 1, 1), (3, 8, 8, 2, 1, 1), (2, 8, 4, 2, 4, 2), (2, 8, 8, 4, 2, 1), (4, 12, 4, 2, 4, 3)],
)
def test_expected_rows_are_the_mean_over_all_choices(
    topk: int, experts: int, ep: int, node_ranks: int, groups: int, chosen_groups: int
) -> None:
    ways = chosen(experts, topk, groups, chosen_groups)
    routing = [list(ways)] * ep
    moe = layer(topk, experts, ep, node_ranks, groups=groups, chosen_groups=chosen_groups)
    for expected, sent in (
        (moe.node_rows(), rows_by_node(routing, experts, node_ranks)),
        (moe.plain_rows(), plain_rows(routing, experts, node_ranks)),
    ):
        assert sum(rank.between for rank in sent) / ep / len(ways) == pytest.approx(expected.between)
        assert sum(rank.within for rank in sent) / ep / len(ways) == pytest.approx(expected.within)


def test_a_dropped_pair_may_leave_a_node_without_the_token() -> None:
    """Two of four experts, one per rank, each pair kept with a chance of 1/2: all cases by hand."""
    moe = layer(2, 4, 4, 2, kept=0.5)
    ways = list(product(combinations(range(4), 2), product((0, 1), repeat=2)))
    kept = [[expert for expert, keep in zip(pair, keeps, strict=True) if keep] for pair, keeps in ways]
    sent = rows_by_node([kept] * 4, 4, 2)
    assert sum(rank.between for rank in sent) / 4 / len(kept) == pytest.approx(moe.node_rows().between)
    assert sum(rank.within for rank in sent) / 4 / len(kept) == pytest.approx(moe.node_rows().within)


def test_ranks_that_share_no_node_send_nothing_within_one() -> None:
    moe = layer(4, 16, 8, 1)
    assert moe.node_rows().within == moe.plain_rows().within == 0
    assert moe.node_rows().between < moe.plain_rows().between  # once per rank


def test_one_node_sends_nothing_between_nodes() -> None:
    moe = layer(4, 16, 8, 8)
    assert moe.node_rows().between == moe.plain_rows().between == 0


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
