"""Brings tokens to their experts and the expert outputs back, by sorting; no one-hot matrices.

    tokens [T, H]   a        b        c         each with k choices: pairs a1 a2 b1 b2 c1 c2
    dispatch        stable sort of the pairs by expert, one row per kept pair
    rows [R, H]     a2 c1 | b1 | a1 b2 c2       experts 0, 1, 2
    combine         each token adds up its rows; the experts' weights have been multiplied in before

Dispatch and combine are adjoint: the backward of each is the forward of the other. Only indices are saved.
Here all experts live on this rank; ``expert_parallel`` has them on many.

Shape letters: T tokens, k choices per token, H hidden, E experts, R rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.ops import op
from megapar.core.exchange import AllToAll
from megapar.core.replay import Replay
from megapar.moe.stats import count_pairs


class Permutation(NamedTuple):
    """Where each (token, choice) pair went. Pairs are numbered token · k + choice.

    pair: [R] int64, the pair of each row; rows are sorted by expert, then by pair.
    row: [T, k] int64, the row of each pair; any row where the pair is not kept.
    pair_kept: [T, k] bool; None: every pair is kept.
    row_kept: [R] bool, False for rows beyond the kept pairs; None: there are none.
    """

    pair: Tensor
    row: Tensor
    pair_kept: Tensor | None
    row_kept: Tensor | None


class Plan(NamedTuple):
    """How the rows of one piece of a micro-batch travel; made once, used there, back, and in backward.

    permutation: pairs to rows as they are sent, sorted by expert and with that by rank.
    exchange: the all-to-all over ep. received: rows it brings this rank.
    room: rows this rank has in what is gathered over emp, the most that any of its ranks received.
    order: rows as received (or gathered) to rows sorted by expert; None where they are sorted.
    counts: [E] int64, rows of each expert of this rank, after the gathering; None where all are those of ``expert``.
    sizes: the same on the host, where it knows them anyway.
    """

    permutation: Permutation
    exchange: AllToAll
    received: int
    room: int
    order: Permutation | None
    counts: Tensor | None
    expert: int = 0
    sizes: tuple[int, ...] | None = None


class Dispatched(NamedTuple):
    """What the experts of this rank work on.

    rows: [R, H] sorted by expert. counts: [E] int64 rows of each expert, which sum to R.
    weights: one per row that came from a token, to multiply its expert output with; 0 beyond the kept pairs. They
    stand in the order in which the rows go back, which is that of ``rows`` where nothing travels.
    permutation: the way back to the tokens. plan: the way over the ranks; None where nothing travels.
    """

    rows: Tensor
    weights: Tensor
    counts: Tensor
    permutation: Permutation
    plan: Plan | None = None


class Dispatcher(Protocol):
    """The two verbs every dispatcher has: to the experts, and back.

    replay: of the recomputed unit that the layer is in. closing: of the one whose output needs the result and nothing
    else does.
    """

    def dispatch(
        self,
        x_TH: Tensor,
        weights_Tk: Tensor,
        experts_Tk: Tensor,
        kept_Tk: Tensor | None,
        rows: int,
        exact: bool,
        replay: Replay | None = None,
    ) -> Dispatched:
        """Send every kept pair's token and weight to its expert. rows: room to make, exact: all of it is needed."""
        ...

    def combine(self, rows_RH: Tensor, sent: Dispatched, closing: Replay | None = None) -> Tensor:
        """[T, H]: the expert outputs times their weights, summed per token."""
        ...


class LocalDispatcher:
    """All experts live on this rank: nothing is communicated."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(
        self,
        x_TH: Tensor,
        weights_Tk: Tensor,
        experts_Tk: Tensor,
        kept_Tk: Tensor | None,
        rows: int,
        exact: bool,
        replay: Replay | None = None,
    ) -> Dispatched:
        """Sort the kept pairs by expert and gather their tokens.

        kept_Tk: bool; None keeps every pair. rows (R): at least the number of kept pairs, known on the host so
        that the device is never waited for; exact: it is that number. Rows beyond the kept pairs are zeros
        that the last expert computes; they have weight 0 and reach no token.
        """
        permutation, counts_E = sort_by_expert(experts_Tk, kept_Tk, self.num_experts, rows, exact=exact)
        weights_R = weights_Tk.flatten().index_select(0, permutation.pair)
        return Dispatched(permute(x_TH, permutation), weights_R, counts_E, permutation)

    def combine(self, rows_RH: Tensor, sent: Dispatched, closing: Replay | None = None) -> Tensor:
        """[T, H]: the expert outputs times their weights, summed per token in fp32 at least; 0 where none was kept."""
        return unpermute(weigh(rows_RH, sent.weights), sent.permutation)


def weigh(rows_RH: Tensor, weights_R: Tensor) -> Tensor:
    """[R, H]: each row times its weight, rounded to the rows' dtype first."""
    return rows_RH * weights_R.to(rows_RH.dtype)[:, None]


def sort_by_expert(
    experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, rows: int, *, exact: bool
) -> tuple[Permutation, Tensor]:
    """The permutation that sorts the kept pairs by expert into ``rows`` rows, and the rows of each expert [E].

    Pairs of one expert stay in token order. Rows beyond the kept pairs count for the last expert.
    """
    key = experts_Tk if kept_Tk is None else torch.where(kept_Tk, experts_Tk, num_experts)
    order = torch.sort(key.flatten(), stable=True).indices
    row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    counts_E = count_pairs(experts_Tk, kept_Tk, num_experts).sum(0)
    row_kept = None
    if not exact:
        num_kept = counts_E.sum()
        row_kept = torch.arange(rows, device=order.device) < num_kept
        counts_E[-1] += rows - num_kept
    row_Tk = row.clamp(max=max(rows - 1, 0)).view_as(experts_Tk)
    return Permutation(order[:rows], row_Tk, kept_Tk, row_kept), counts_E


def spread_by_expert(experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, capacity: int) -> Permutation:
    """The permutation that gives every expert ``capacity`` rows, its kept pairs first, in token order.

    No expert may have more kept pairs than that. The host does not wait for the device.
    """
    key = (experts_Tk if kept_Tk is None else torch.where(kept_Tk, experts_Tk, num_experts)).flatten()
    order = torch.sort(key, stable=True).indices
    counts_E = count_pairs(experts_Tk, kept_Tk, num_experts).sum(0)
    sorted_key, rows = key[order], num_experts * capacity
    first = F.pad(counts_E.cumsum(0), (1, 0))
    place = torch.arange(order.numel(), device=order.device) - first[sorted_key]
    # Pairs that are not kept share one row behind the last, which is cut off.
    row_sorted = torch.where(sorted_key < num_experts, sorted_key * capacity + place, rows)
    pair = order.new_zeros(rows + 1).scatter_(0, row_sorted, order)[:rows]
    row = torch.empty_like(order).scatter_(0, order, row_sorted).clamp(max=max(rows - 1, 0))
    row_kept = torch.arange(capacity, device=order.device) < counts_E[:, None]
    return Permutation(pair, row.view_as(experts_Tk), kept_Tk, row_kept.flatten())


def permute(x_TH: Tensor, permutation: Permutation) -> Tensor:
    """[R, H]: the token of each row; zeros beyond the kept pairs. Backward is ``unpermute``."""
    return _Permute.apply(x_TH, *permutation)  # type: ignore[no-any-return]


def unpermute(rows_RH: Tensor, permutation: Permutation) -> Tensor:
    """[T, H]: the sum of each token's rows. Backward is ``permute``."""
    return _Unpermute.apply(rows_RH, *permutation)  # type: ignore[no-any-return]


class _Permute(torch.autograd.Function):
    # The permutation travels as saved tensors, so that recomputation and offloading see it.
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, *permutation: Any) -> Tensor:
        ctx.save_for_backward(*permutation)
        return _gather(x_TH, Permutation(*permutation))

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gather_sum(grad_RH, Permutation(*ctx.saved_tensors)), None, None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, *permutation: Any) -> Tensor:
        ctx.save_for_backward(*permutation)
        return gather_sum(rows_RH, Permutation(*permutation))

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _gather(grad_TH, Permutation(*ctx.saved_tensors)), None, None, None, None


def _gather(x_TH: Tensor, permutation: Permutation) -> Tensor:
    rows_RH = op("permute", x_TH)(x_TH, permutation.pair, permutation.row, permutation.pair_kept)
    if permutation.row_kept is None:
        return rows_RH
    return rows_RH.masked_fill_(~permutation.row_kept[:, None], 0)


def gather_sum(rows_RH: Tensor, permutation: Permutation) -> Tensor:
    """``unpermute`` outside autograd."""
    num_tokens, topk = permutation.row.shape
    if rows_RH.shape[0] == 0 or num_tokens == 0:
        return rows_RH.new_zeros(num_tokens, rows_RH.shape[1])
    kept = permutation.pair_kept
    if topk == 1:
        y_TH = rows_RH.index_select(0, permutation.row.flatten())
        return y_TH if kept is None else y_TH.masked_fill_(~kept, 0)
    return op("unpermute", rows_RH)(rows_RH, permutation.row, kept)
