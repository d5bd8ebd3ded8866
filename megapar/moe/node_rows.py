"""Rows of the dispatch by node, and their route: one row to each node that has an expert of its token.

    source   tokens [T]   choices, sorted by expert: 0 2 | 5 7     two experts to a rank, two ranks to a node
                          node of each choice:       0 0 | 1 1     the first of each node sends the row:
                                                     ^     ^       two rows for this token
    entry    rows [R]     the same on the rank that the row entered by, within its node: one row to each rank
    rank     rows [R]     a copy for each of its experts here, in the order of experts

Choices of one destination are neighbours once they are sorted, so no row is compared with another, and rows are summed
in the order of nodes, ranks and experts. A token with no kept pair has no row.

    row    x x x x x ... | - | g0 g1 g2 | 4 _ 7    token, padding, the k weights, the k experts (int16, _: empty)

A row has a field for each of the token's k choices, empty if its pair is dropped or its expert is on another node.
Weights are max(fp32, dtype) and keep all their bits. A row is a multiple of 16 bytes. In a row of the gradient, a field
has the gradient of its weight.

Shape letters: T tokens, k choices per token, H hidden, R rows, C columns of a row, w columns after the token, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapar.core.comm.exchange import AllToAll
from megapar.core.comm.two_hops import TwoHops
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.expert_rows import token_of
from megapar.moe.dispatch_bytes import NO_EXPERT, node_row_bytes
from megapar.moe.expert_order import ExpertOrder, gather_rows, gather_sum, sort_by_expert

EMPTY = NO_EXPERT - 2**16  # as int16


@dataclass
class NodeRoute:
    """The way of one message: how its rows are relayed, and their order here, both known once they have arrived.

    Attributes:
        first_expert: The first expert of this node.
        local: Experts of each rank.
        relayed: Rows that this rank relays to the ranks of its node.
        hop: Fields of the rows that entered here to the rows that are relayed.
        arrival: Fields of the rows that arrived at this rank to pairs, sorted by expert.
    """

    first_expert: int
    local: int
    ranks: int
    topk: int
    relayed: int
    hop: ExpertOrder = field(init=False)
    arrival: ExpertOrder = field(init=False)

    def relay(self, rows_RC: Tensor) -> Tensor:
        """Return a row for each rank of the node that has an expert of a row's fields."""
        # Fields with an expert are all on this node; those without one give a negative rank.
        rank_Rk = (experts_of(rows_RC, self.topk) - self.first_expert).div(self.local, rounding_mode="floor")
        leads_Rk = first_of_each(rank_Rk, rank_Rk >= 0)
        self.hop = sort_by_expert(rank_Rk, leads_Rk, self.ranks, self.relayed).order
        return self.spread(rows_RC)

    def spread(self, rows: Tensor) -> Tensor:
        """Copy rows that entered here for the ranks of the node, as ``relay`` did: [R, ..] to [relayed, ..]."""
        return gather_rows(rows, self.hop)

    def collect(self, rows_RH: Tensor) -> Tensor:
        """Sum the ranks' rows, the adjoint of ``spread``."""
        return gather_sum(rows_RH, self.hop)

    def collect_gradients(self, rows_RC: Tensor) -> Tensor:
        """Sum the ranks' gradients of rows with fields."""
        return sum_rows(rows_RC, self.hop)

    def arrive(self, rows_RC: Tensor, first_expert: int, pairs: int) -> ExpertOrder:
        """Order the arrived rows' ``pairs`` fields with an expert of this rank, from ``first_expert`` on, by expert."""
        experts_Rk = experts_of(rows_RC.detach(), self.topk) - first_expert
        here = (experts_Rk >= 0) & (experts_Rk < self.local)
        self.arrival = sort_by_expert(experts_Rk, here, self.local, pairs).order
        return self.arrival

    def way_back(self, way: TwoHops) -> TwoHops:
        """Return the exchange of the experts' outputs [R, H], one row per arrived row. way: that of the dispatch."""
        there: AllToAll = way.second.conjugate()
        return TwoHops(way.axis, there, way.first.conjugate(), self.collect, self.spread, way.slow, way.device)


def first_of_each(keys_Tk: Tensor, real_Tk: Tensor) -> Tensor:
    """Keep True in ``real_Tk`` for the first of equal neighbours among the keys of each row, and return it: [T, k]."""
    real_Tk[:, 1:].logical_and_(keys_Tk[:, 1:] != keys_Tk[:, :-1])
    return real_Tk


@dataclass(frozen=True)
class NodeMessage:
    """A message for ``async_pairs.defer``, by node: a row for each token and node that has a kept expert of it.

    Attributes:
        order: Choices, sorted by expert, to rows: the first choice of each node stands for the node.
        experts: [R, k] int16, the experts of each row's fields.
        choices: [T, k] int64, the choices of each token, sorted by expert.
    """

    order: ExpertOrder
    experts: Tensor
    choices: Tensor
    hidden: int

    def build(self, *inputs: Tensor) -> Tensor:
        x_TH, weights_Tk = inputs
        token_R = token_of(self.order.pair, self.order.row.shape[1])
        weights_Rk = weights_Tk.gather(1, self.choices).index_select(0, token_R)
        return write(x_TH, token_R, weights_Rk.masked_fill_(self.experts < 0, 0), self.experts)

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(grad, self.order, self.choices, self.hidden)


def build(x_TH: Tensor, weights_Tk: Tensor, message: NodeMessage) -> Tensor:
    """Build the message, with its gradient: [R, C]."""
    return _Build.apply(x_TH, weights_Tk, message.experts, message.choices, *message.order)


def write(x_NH: Tensor, row_R: Tensor | None, weights_Rk: Tensor, experts_Rk: Tensor | None) -> Tensor:
    """Write rows [R, C].

    Args:
        row_R: Token of each row; None: the tokens in their order.
        weights_Rk: Weights of the fields, max(fp32, dtype).
        experts_Rk: int16, experts of the fields; None: zeros, for a gradient.
    """
    (rows, topk), hidden = weights_Rk.shape, x_NH.shape[1]
    columns = node_row_bytes(hidden, topk, weights_Rk.itemsize, x_NH.itemsize) // x_NH.itemsize
    message = x_NH.new_empty(rows, columns)
    if row_R is None:
        message[:, :hidden] = x_NH
    else:
        torch.index_select(x_NH, 0, row_R, out=message[:, :hidden])
    words, bits = message.view(torch.int16), _bits(weights_Rk, torch.int16)
    start = words.shape[1] - _words(x_NH, topk)
    end = start + bits.shape[1]
    if experts_Rk is None or start > hidden * x_NH.itemsize // 2 or end + topk < words.shape[1]:
        words[:, hidden * x_NH.itemsize // 2 :] = 0
    words[:, start:end] = bits
    if experts_Rk is not None:
        words[:, end : end + topk] = experts_Rk
    return message


def experts_of(message: Tensor, topk: int) -> Tensor:
    """Read the experts of the fields of rows [R, C]: [R, k] int64, ``EMPTY`` for empty fields."""
    start = message.shape[1] * message.itemsize // 2 - _words(message, topk)
    start += topk * at_least_fp32(message.dtype).itemsize // 2
    return message.view(torch.int16)[:, start : start + topk].long()


def weights_of(message: Tensor, topk: int) -> Tensor:
    """Read the weights of the fields of rows [R, C]: [R, k]."""
    dtype = at_least_fp32(message.dtype)
    start = message.shape[1] * message.itemsize // 2 - _words(message, topk)
    return _bits(message.view(torch.int16)[:, start : start + topk * dtype.itemsize // 2], dtype)


def sum_rows(message: Tensor, order: ExpertOrder) -> Tensor:
    """Sum rows [.., C] of gradients, tokens and fields alike: [R, C]."""
    topk = order.row.shape[1]
    if at_least_fp32(message.dtype) == message.dtype:  # Fields are then columns like any other.
        return gather_sum(message, order)
    weights_Rk = gather_sum(weights_of(message, topk), order)
    before = message.shape[1] - _words(message, topk)
    sums = (gather_sum(message[:, :before], order), _bits(weights_Rk, message.dtype))
    return torch.cat((*sums, message.new_zeros(weights_Rk.shape)), dim=1)


def arrive(message: Tensor, order: ExpertOrder, hidden: int, room: int) -> tuple[Tensor, Tensor]:
    """Return (the token of each pair of ``order`` [room, H], zeros after the last, and the pairs' weights [P])."""
    return _Arrive.apply(message, hidden, room, *order)


def _gradients(grad: Tensor, order: ExpertOrder, choices_Tk: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens [T, H] and weights [T, k]: sums over the rows of each node, in order."""
    sorted_Tk = gather_sum(weights_of(grad, order.row.shape[1]), order)
    return gather_sum(grad[:, :hidden], order), torch.empty_like(sorted_Tk).scatter_(1, choices_Tk, sorted_Tk)


def _words(rows: Tensor, topk: int) -> int:
    """Return the words of 2 bytes from the first field to the end of a row, whole elements."""
    words = rows.itemsize // 2
    return -(-topk * (at_least_fp32(rows.dtype).itemsize // 2 + 1) // words) * words


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of a matrix as columns of ``dtype``."""
    columns = x.shape[1] * x.itemsize // dtype.itemsize
    # A copy of columns even if they are contiguous, because a view as a wider dtype needs an aligned start; flat,
    # because a matrix without rows may have any strides.
    whole = x.clone(memory_format=torch.contiguous_format) if dtype.itemsize > x.itemsize else x.contiguous()
    return whole.flatten().view(dtype).view(x.shape[0], columns)


class _Build(torch.autograd.Function):
    # The order is passed as saved tensors, so that recomputation and offloading hooks see it.
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weights_Tk: Tensor, experts: Tensor, choices: Tensor, *order: Any) -> Tensor:
        ctx.save_for_backward(choices, *order)
        ctx.hidden = x_TH.shape[1]
        return NodeMessage(ExpertOrder(*order), experts, choices, ctx.hidden).build(x_TH, weights_Tk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        choices, *order = ctx.saved_tensors
        gradients = _gradients(grads[0], ExpertOrder(*order), choices, ctx.hidden)
        return *gradients, None, None, *(None,) * len(order)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: Tensor, hidden: int, room: int, *order: Any) -> tuple[Tensor, Tensor]:
        pairs = ExpertOrder(*order)
        ctx.save_for_backward(*order)
        topk, count = pairs.row.shape[1], pairs.pair.shape[0]
        tokens = message.new_empty(room, hidden)
        torch.index_select(message[:, :hidden], 0, token_of(pairs.pair, topk), out=tokens[:count])
        if room > count:
            tokens[count:] = 0
        return tokens, weights_of(message, topk).flatten().index_select(0, pairs.pair)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        order, (grad_PH, grad_P) = ExpertOrder(*ctx.saved_tensors), grads
        count = order.pair.shape[0]
        sums_RH = gather_sum(grad_PH[:count], order)
        grad_Rk = grad_P[order.row] if count else grad_P.new_zeros(order.row.shape)
        if order.pair_kept is not None:
            grad_Rk = torch.where(order.pair_kept, grad_Rk, 0)
        return write(sums_RH, None, grad_Rk, None), None, None, *(None,) * len(order)
