"""One micro-batch's way through an MoE layer, slice by slice, so that its collectives fly under other slices' work.

Program order for d slices (``^`` launch, ``v`` wait; D dispatch, C combine, exp experts, sh shared experts):

    send(0) D0^  send(1) D1^ ... | D0v exp0 C0^ sh0  D1v exp1 C1^ sh1 ... | C0v C1v ...

With pieces (pipe-experts) every D, exp and C of a slice stands for several: one per local expert and part of its rows.
With pieces, and with ``overlap_mp``, what the experts need from each other over emp flies too (E enter, L leave):

    D0v E0^ | D1v E1^ E0v exp0 L0^ | D2v E2^ E1v exp1 L1^ L0v C0^ | ...

Nothing here is written for the backward: it is the mirror, by the start/wait pairs. On a device that runs ahead of its
host, ``Dc^`` is issued when slice c + 1 is sent (its attention stands in the queue by then, and the host waits for the
counts of slice c only); its place in the graph stays the one drawn.

Shape letters: B samples, s positions of a slice on this rank, T = B·s tokens, H hidden, E experts, L experts on this
rank, k choices per token, P ranks that share a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megapar.core.device.base import Event
from megapar.core.replay import Replay, kept_as_it_is, once
from megapar.core.tickets import Deferred, Ticket, defer, wait
from megapar.moe.capacity import capacity_on_device
from megapar.moe.dispatch import Permutation, Plan, unpermute, weigh
from megapar.moe.expert_parallel import Announced, Flying
from megapar.moe.experts import Experts
from megapar.moe.message import RowsOfTokens
from megapar.moe.pieces import cut_plan
from megapar.moe.router import Routing, gate_weights
from megapar.moe.stats import MoeStats, RouterSums, add_sums, gather_sums

if TYPE_CHECKING:
    from megapar.moe.layer import MoeLayer


T = TypeVar("T")


class Arriving:
    """The combines of a layer's slices, in flight. No pytree on purpose: hooks, casts and copies leave it alone.

    What autograd must see, the tokens, is passed beside it.
    """

    def __init__(self, tickets: Sequence[tuple[Ticket, ...]], permutations: Sequence[Permutation]) -> None:
        self._tickets = tuple(tickets)
        self._permutations = tuple(permutations)

    def finish(self, number: int, tokens: Sequence[Tensor]) -> Tensor:
        """[T, H]: wait for slice ``number``, whose pieces have these tokens, and sum each token's rows."""
        rows = [wait(token, ticket) for token, ticket in zip(tokens, self._tickets[number], strict=True)]
        # So that in a recomputed unit's backward the gradients of all slices leave before the unit runs again.
        with kept_as_it_is():
            return unpermute(rows[0] if len(rows) == 1 else torch.cat(rows), self._permutations[number])


@dataclass(frozen=True)
class _Sent:
    """The tickets of combines, per slice; no pytree."""

    tickets: tuple[tuple[Ticket, ...], ...]


@dataclass
class _Slice:
    """A slice between its router and its experts.

    tokens, deferred: the node of its message. told: None with even splits. plans: one per piece, once issued.
    """

    x_BsH: Tensor
    experts_Tk: Tensor
    kept_Tk: Tensor | None
    weight_dtype: torch.dtype
    tokens: tuple[Tensor, ...]
    deferred: Deferred
    routed: Event
    rows: tuple[int, bool]
    told: Announced | None = None
    permutation: Permutation | None = None
    plans: tuple[Plan, ...] = ()


class Passage:
    """A layer and one micro-batch; ``send`` for every slice in order, then ``work``, then ``stats``.

    tokens: non-padding tokens of the micro-batch, as the host knows them. capacity: of an expert, for all slices.
    replay: of the recomputed unit that the layer is in: run again, slices travel as in its forward, and no counts are
    exchanged. closing: of the one that ends with this layer: run again, combines are not sent.
    """

    def __init__(
        self, layer: MoeLayer, tokens: int, capacity: int | Tensor, replay: Replay | None, closing: Replay | None
    ) -> None:
        self.layer, self.tokens, self.capacity = layer, tokens, capacity
        self._replay, self._closing = replay, closing
        self._slices: list[_Slice] = []
        self._sums: list[RouterSums] = []
        self._orthogonal: Tensor | None = None
        self._before_kE: Tensor | None = None
        self._dispatcher = layer.sliced_dispatcher
        self._device = layer.traffic.device

    # Phase 1: to the experts

    def send(self, x_BsH: Tensor, valid_Bs: Tensor | None) -> None:
        """Route the next slice and send its tokens on their way."""
        self._issue()
        layer = self.layer
        x_TH, valid_T = x_BsH.flatten(0, 1), None if valid_Bs is None else valid_Bs.flatten()
        routing = layer.router(x_TH, valid_T, x_BsH.shape[0])
        self._sums.append(routing.sums)
        self._orthogonal = routing.orthogonal  # the same of every slice
        kept_Tk = self._kept(routing, valid_Bs, x_BsH.shape[0])
        weights_Tk = gate_weights(routing, kept_Tk, over_kept=layer.sizes.has_capacity, scaling=layer.sizes.scaling)
        pieces = layer.slicing.expert_pieces * layer.experts_here or 1
        tokens, deferred = defer((x_TH, weights_Tk), pieces, layer.traffic)
        rows = self._room(x_BsH, padded=valid_T is not None)
        new = _Slice(x_BsH, routing.experts, kept_Tk, weights_Tk.dtype, tokens, deferred, self._device.event(), rows)
        counts = self._dispatcher.counts or layer.slicing.expert_pieces > 0
        if counts and not (self._replay is not None and self._replay.again):
            new.told = self._aside(new, lambda: self._announce(new))
        self._slices.append(new)
        if not self._device.runs_ahead:
            self._issue()

    def _aside(self, new: _Slice, op: Callable[[], T]) -> T:
        """Do what only the dispatch needs: behind the router, on the axis' own stream where the device has streams."""
        if not self._device.runs_ahead:
            return op()
        result = self._device.launch(op, self.layer.traffic.stream(self._dispatcher.ep), new.routed)
        for leaf in _tensors(result):
            self._device.adopt(leaf)
        return result

    def _announce(self, new: _Slice) -> Announced:
        return self._dispatcher.announce(new.experts_Tk, new.kept_Tk, aside=self._device.runs_ahead)

    def _issue(self) -> None:
        """Launch the message of the newest slice, if it has not been."""
        if self._slices and not self._slices[-1].plans:
            new = self._slices[-1]
            new.permutation, new.plans = self._aside(new, lambda: once(self._replay, lambda: self._plan(new)))
            message = RowsOfTokens(new.permutation, new.x_BsH.shape[2], new.weight_dtype)
            after = new.routed if self._device.runs_ahead else None
            rows = [new.permutation.pair.shape[0]]
            if len(new.plans) > 1:
                rows = [sum(plan.exchange.send or ()) for plan in new.plans]
            exchanges = [plan.exchange for plan in new.plans]
            new.deferred.launch(message, exchanges, rows, after, first_only=self.layer.slicing.chained)

    def _plan(self, new: _Slice) -> tuple[Permutation, tuple[Plan, ...]]:
        pieces = self.layer.slicing.expert_pieces
        if pieces:
            assert new.told is not None
            return cut_plan(self._dispatcher, new.told, new.experts_Tk, new.kept_Tk, pieces)
        if new.told is None:
            plan = self._dispatcher.plan(new.experts_Tk, new.kept_Tk, *new.rows)
        else:
            numbers = self._dispatcher.read(new.told)
            plan = self._dispatcher.uneven_plan(new.told, numbers, new.experts_Tk, new.kept_Tk)
        return plan.permutation, (plan,)

    # Phase 2: experts

    def work(self) -> tuple[Arriving, list[tuple[Tensor, ...]], list[Tensor | None]]:
        """Experts and shared experts of every slice: (combines in flight, their tokens, shared outputs) per slice."""
        self._issue()
        sent, tokens, shared = self.layer.experts(self._work, *(new.tokens for new in self._slices))
        permutations = [new.permutation for new in self._slices if new.permutation is not None]
        return Arriving(sent.tickets, permutations), tokens, shared

    def _work(
        self, experts: Experts, *dispatched: tuple[Tensor, ...]
    ) -> tuple[_Sent, list[tuple[Tensor, ...]], list[Tensor | None]]:
        """The one call of the experts. dispatched: the tokens of each slice's messages."""
        layer = self.layer
        one_by_one = experts.apart() if layer.slicing.expert_pieces else []
        sent: list[list[Flying]] = [[] for _ in self._slices]
        shared: list[Tensor | None] = [None] * len(self._slices)
        jobs = [(c, p) for c, new in enumerate(self._slices) for p in range(len(new.plans))]
        over_emp = layer.slicing.overlap_mp and self._dispatcher.emp.size > 1
        ahead = 1 if over_emp or layer.slicing.expert_pieces else 0
        if layer.slicing.chained and not self._device.runs_ahead:
            ahead = 0  # a host that chains by waiting would wait for what it is to compute on
        entered: list[tuple[Flying, Tensor]] = []
        left: list[tuple[Flying, Tensor]] = []

        def combine(number: int) -> None:
            c, p = jobs[number]
            plan, (flying, weights_R) = self._slices[c].plans[p], left[number]
            out_RH = self._dispatcher.wait_leave(flying, plan)
            sent[c].append(self._dispatcher.start_combine(weigh(out_RH, weights_R), plan, self._closing))
            if p == len(self._slices[c].plans) - 1:
                shared[c] = layer.beside(self._slices[c].x_BsH, self._closing)

        for number, (c, p) in enumerate(jobs):
            while len(entered) <= min(number + ahead, len(jobs) - 1):
                slice_number, piece = jobs[len(entered)]
                entered.append(self._enter(slice_number, piece, dispatched[slice_number][piece]))
            plan, (flying, weights_R) = self._slices[c].plans[p], entered[number]
            rows_RH = self._dispatcher.wait_enter(flying, plan)
            if plan.counts is None:
                out_RH = one_by_one[plan.expert](rows_RH)
            else:
                known = layer.sizes_of(plan.counts, plan.sizes, rows_RH, self._replay)
                out_RH = experts.compute(rows_RH, plan.counts, known)
            left.append((self._dispatcher.start_leave(out_RH, plan), weights_R))
            if number >= ahead:
                combine(number - ahead)
        for number in range(len(jobs) - ahead, len(jobs)):
            combine(number)
        tickets = _Sent(tuple(tuple(ticket for _, ticket in flying) for flying in sent))
        return tickets, [tuple(token for token, _ in flying) for flying in sent], shared

    def _enter(self, c: int, p: int, token: Tensor) -> tuple[Flying, Tensor]:
        new = self._slices[c]
        flying = token, new.deferred.tickets[p]
        received_RH, weights_R = self._dispatcher.wait_dispatch(
            flying, new.plans[p], new.x_BsH.shape[2], new.weight_dtype
        )
        entering = self._dispatcher.start_enter(received_RH)
        new.deferred.send_next()  # where pieces are chained, the next one leaves behind this
        return entering, weights_R

    # Statistics of the whole, whatever the slices

    def stats(self) -> MoeStats:
        """Those of the micro-batch, from sums over all slices; with capacity ``slice`` each has drops of its own."""
        layer, sums = self.layer, add_sums(self._sums)
        counts_PkE = sums.counts[None]
        if layer.parted:
            sums, counts_PkE = gather_sums(sums, layer.share)
        stats = layer.stats(sums, counts_PkE, self.tokens, self._orthogonal)
        if not layer.sizes.has_capacity or layer.slicing.capacity == "global":
            return stats
        counts_PdkE = torch.stack([part.counts for part in self._sums])[None]
        if layer.parted:
            counts_PdkE = layer.share.gather(counts_PdkE)
        if not (layer.parted and layer.alone):
            counts_PdkE = counts_PdkE.sum(0, keepdim=True)
        capacity_Pd = capacity_on_device(layer.sizes, counts_PdkE[:, :, 0].sum(2))
        over_PdE = counts_PdkE.sum(2) - capacity_Pd[:, :, None]
        return stats._replace(dropped=over_PdE.clamp(min=0).sum())

    def _kept(self, routing: Routing, valid_Bs: Tensor | None, batch: int) -> Tensor | None:
        layer, sizes = self.layer, self.layer.sizes
        valid_T = None if valid_Bs is None else valid_Bs.flatten()
        counts_PkE, piece = routing.sums.counts[None], 0
        if not sizes.has_capacity:
            return layer.kept(routing, counts_PkE, valid_T, batch, 0)
        if not layer.alone:  # ranks stand in order of position in this slice
            order = layer.share.slice_order(len(self._slices))
            counts_PkE, piece = layer.share.sort(layer.share.gather(counts_PkE), order), order.index(layer.share.rank)
        if layer.slicing.capacity == "slice":
            capacity: int | Tensor = capacity_on_device(sizes, counts_PkE[:, 0].sum())
            number = len(self._slices)
            return layer.kept(routing, counts_PkE, valid_T, batch, capacity, piece, slice_number=number)
        if self._before_kE is None:
            self._before_kE = torch.zeros_like(counts_PkE[0])
        before_kE, self._before_kE = self._before_kE, self._before_kE + counts_PkE.sum(0)
        return layer.kept(routing, torch.cat([before_kE[None], counts_PkE]), valid_T, batch, self.capacity, piece + 1)

    def _room(self, x_BsH: Tensor, *, padded: bool) -> tuple[int, bool]:
        """Rows to make room for where no counts are exchanged, and whether all of them are needed."""
        sizes, positions = self.layer.sizes, x_BsH.shape[0] * x_BsH.shape[1]
        if self._dispatcher.even:
            return sizes.num_experts * sizes.capacity(positions), False
        return positions * sizes.topk, not (sizes.has_capacity or padded)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of plans and counts, at any depth of tuples."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
