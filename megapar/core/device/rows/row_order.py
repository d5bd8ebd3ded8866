"""Orders of experts' rows: (token, choice) pairs sorted by expert, and received rows sorted by expert.

Every form gives the same numbers.

Shape letters: T tokens, k choices per token, E experts, L experts on this rank, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.rows import row_operators


class RowOrder(NamedTuple):
    """An order of rows with the rows of each expert.

    Attributes:
        pair: [R] int64, the pair of each row.
        row: [T, k] int64, the row of each pair; of pairs that are not kept, any row.
        kept: bool; for ``sort_pairs`` [R], False for rows without a kept pair; for ``order_runs`` [T, 1], False for
            places without a row. None: all are kept.
        counts: [E] int64, rows of each expert.
        ends: [E] int32, the row after the last one of each expert, as ``grouped_mm`` takes it; None: not computed.
    """

    pair: Tensor
    row: Tensor
    kept: Tensor | None
    counts: Tensor
    ends: Tensor | None


def sort_pairs_reference(
    experts_Tk: Tensor,
    kept_Tk: Tensor | None,
    num_experts: int,
    rows: int,
    *,
    fill: bool = False,
    counts_kE: Tensor | None = None,
) -> RowOrder:
    """Sort the kept pairs by expert into ``rows`` rows; pairs of one expert stay in token order.

    Args:
        experts_Tk: The experts of each token.
        kept_Tk: bool; None: every pair is kept.
        num_experts: E.
        rows: R, from the number of kept pairs to that of all.
        fill: Give the rows beyond the kept pairs to the last expert; they have a pair, but are not kept.
        counts_kE: The kept pairs of each choice and expert, if they have been counted.
    """
    key = _keys(experts_Tk, kept_Tk, num_experts)
    order = torch.sort(key, stable=True).indices
    row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    if rows < order.numel():
        order, row = order[:rows], row.clamp(max=max(rows - 1, 0))
    counts_E = _counts(key, num_experts) if counts_kE is None else counts_kE.sum(0)
    kept_R = None
    if fill:
        num_kept = counts_E.sum()
        kept_R = torch.arange(rows, device=order.device) < num_kept
        counts_E[-1] += rows - num_kept
    return RowOrder(order, row.view_as(experts_Tk), kept_R, counts_E, None)


def sort_pairs_cuda(
    experts_Tk: Tensor,
    kept_Tk: Tensor | None,
    num_experts: int,
    rows: int,
    *,
    fill: bool = False,
    counts_kE: Tensor | None = None,
) -> RowOrder:
    """Compute ``sort_pairs_reference`` by counting, in two passes over the pairs."""
    if not row_operators.takes_experts(experts_Tk, num_experts):
        return sort_pairs_reference(experts_Tk, kept_Tk, num_experts, rows, fill=fill, counts_kE=counts_kE)
    pair, row, kept, counts, ends = row_operators.sort_pairs(experts_Tk, kept_Tk, num_experts, rows, None, fill=fill)
    return RowOrder(pair, row, kept if fill else None, counts, ends)


def spread_pairs_reference(
    experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the kept pairs by expert, with ``capacity`` rows for each: (pair [R], row [T, k], row_kept [R]).

    No expert may have more kept pairs than ``capacity``. The host does not wait for the device.
    """
    key = _keys(experts_Tk, kept_Tk, num_experts)
    order = torch.sort(key, stable=True).indices
    counts_E = _counts(key, num_experts)
    sorted_key, rows = key[order], num_experts * capacity
    first = F.pad(counts_E.cumsum(0), (1, 0))
    place = torch.arange(order.numel(), device=order.device) - first[sorted_key]
    # Pairs that are not kept share one row after the last, which is cut off.
    row_sorted = torch.where(sorted_key < num_experts, sorted_key * capacity + place, rows)
    pair = order.new_zeros(rows + 1).scatter_(0, row_sorted, order)[:rows]
    row = torch.empty_like(order).scatter_(0, order, row_sorted).clamp(max=max(rows - 1, 0))
    row_kept = torch.arange(capacity, device=order.device) < counts_E[:, None]
    return pair, row.view_as(experts_Tk), row_kept.flatten()


def spread_pairs_cuda(
    experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``spread_pairs_reference`` by counting, in two passes over the pairs."""
    if not row_operators.takes_experts(experts_Tk, num_experts):
        return spread_pairs_reference(experts_Tk, kept_Tk, num_experts, capacity)
    rows = num_experts * capacity
    return row_operators.sort_pairs(experts_Tk, kept_Tk, num_experts, rows, capacity, fill=False)[:3]


def order_runs_reference(counts_NSL: Tensor, room: int, rows: int) -> RowOrder:
    """Return the order that sorts gathered rows by expert; rows of one expert keep theirs, padding is left out.

    Args:
        counts_NSL: int64, rows in block n from source s for expert l, in this order.
        room: Rows of each block, including padding.
        rows: The sum of the counts, on the host.
    """
    blocks, device, total = counts_NSL.shape[0], counts_NSL.device, room * counts_NSL.shape[0]
    # The rows come in runs, one per count. Sorting moves whole runs, so no key of a row is compared.
    ends_LNS = counts_NSL.permute(2, 0, 1).flatten().cumsum(0)
    come_NSL = counts_NSL.flatten(1).cumsum(1).view_as(counts_NSL)
    if blocks > 1:
        come_NSL = come_NSL + room * torch.arange(blocks, device=device)[:, None, None]
    come_LNS = come_NSL.permute(2, 0, 1)
    ahead_Q = (ends_LNS.view(come_LNS.shape) - come_LNS).flatten()  # places that each run moves towards the end
    place_R = torch.arange(rows, device=device)
    pair_R = place_R - ahead_Q.index_select(0, torch.searchsorted(ends_LNS, place_R, right=True))
    counts_L = counts_NSL.sum((0, 1))
    if rows == total:
        row_P = torch.empty_like(pair_R).scatter_(0, pair_R, place_R)
        return RowOrder(pair_R, row_P[:, None], None, counts_L, None)
    row_P, real_P = place_R.new_zeros(total), place_R.new_zeros(total, dtype=torch.bool)
    row_P.scatter_(0, pair_R, place_R)
    return RowOrder(pair_R, row_P[:, None], real_P.scatter_(0, pair_R, True)[:, None], counts_L, None)


def order_runs_cuda(counts_NSL: Tensor, room: int, rows: int) -> RowOrder:
    """Compute ``order_runs_reference`` in one kernel, which moves one run per block of threads."""
    if not row_operators.takes_runs(counts_NSL, counts_NSL.numel()):
        return order_runs_reference(counts_NSL, room, rows)
    pair, row, real, counts, ends = row_operators.order_runs(counts_NSL, counts_NSL.shape, room, rows, 0)
    return RowOrder(pair, row, None if rows == room * counts_NSL.shape[0] else real[:, None], counts, ends)


def order_equal_runs_reference(like: Tensor, sources: int, experts: int, length: int) -> RowOrder:
    """Return ``order_runs_reference`` if each of ``sources`` sends ``length`` rows to each expert.

    like: a tensor of the device.
    """
    place_P = torch.arange(sources * experts * length, device=like.device)
    pair_R = place_P.view(sources, experts, length).transpose(0, 1).flatten()
    row_P = place_P.view(experts, sources, length).transpose(0, 1).flatten()
    counts_L = torch.full((experts,), sources * length, dtype=torch.int64, device=like.device)
    return RowOrder(pair_R, row_P[:, None], None, counts_L, None)


def order_equal_runs_cuda(like: Tensor, sources: int, experts: int, length: int) -> RowOrder:
    """Compute ``order_equal_runs_reference`` in one kernel."""
    runs = sources * experts
    if not row_operators.takes_runs(like, runs):
        return order_equal_runs_reference(like, sources, experts, length)
    rows = runs * length
    pair, row, _, counts, ends = row_operators.order_runs(like, (1, sources, experts), rows, rows, length)
    return RowOrder(pair, row, None, counts, ends)


def _keys(experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int) -> Tensor:
    return (experts_Tk if kept_Tk is None else torch.where(kept_Tk, experts_Tk, num_experts)).flatten()


def _counts(key: Tensor, num_experts: int) -> Tensor:
    """Count the pairs of each expert, [E]; pairs that are not kept have key E."""
    # A number is added, not a tensor, for which torch's deterministic form would copy from pageable memory and wait.
    return key.new_zeros(num_experts + 1).scatter_(0, key, 1, reduce="add")[:-1]
