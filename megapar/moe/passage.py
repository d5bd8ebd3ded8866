"""A passage: one micro-batch goes through an MoE layer slice by slice; the unsliced layer is a passage of one slice.

Every slice takes the same steps (``^`` launch, ``v`` wait; the numbers mark the lines that perform them):

    [1] route   [2] keep   [3] D^ dispatch   [4] Dv  E^ enter   [5] Ev   [6] exp experts  L^ leave   [7] Lv  C^ combine
    [8] Cv  sum each token's rows; sh: the shared experts

Program order of one slice, where every wait follows its launch, and of d slices, where the collectives of one slice are
hidden under the computation of others:

    1 2 3 4 5 6 7 8 sh
    send(0) 1 2 D0^  send(1) 1 2 D1^ ... |  D0v exp0 C0^ sh0  D1v exp1 C1^ sh1 ... |  C0v C1v ...

With pieces (pipe-experts), every D, exp and C of a slice is several: one per local expert and part of its rows. With
pieces, and with ``overlap_mp``, the experts' collectives over emp, if there are any, are hidden, too:

    D0v E0^ | D1v E1^ E0v exp0 L0^ | D2v E2^ E1v exp1 L1^ L0v C0^ | ...

The backward is not written out: the start/wait pairs make it the mirror image.

Shape letters: B samples, s positions of a slice on this rank, T = B·s tokens, H hidden, E experts, k choices per token,
R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megapar.core.comm.async_pairs import Ticket, wait
from megapar.core.recompute.replay import Replay, kept_as_it_is
from megapar.moe.dispatcher import Dispatcher, PendingRows, RoutedPairs
from megapar.moe.expert_order import ExpertOrder, ExpertSlots, unpermute, weigh
from megapar.moe.experts import Experts
from megapar.moe.micro_batch import MicroBatchRouting
from megapar.moe.router import Router, gate_weights
from megapar.moe.slice_dispatch import DeferredDispatch, FinishedDispatch
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats

Compute = Callable[..., Tensor]  # as ``Experts.compute``
ComputeOne = Callable[[Tensor, Tensor | None], Tensor]  # as of ``Experts.per_expert``


class PendingCombines:
    """The combines of a layer's slices, in flight. Deliberately not a pytree, so that hooks, casts and copies skip it.

    The tensors that autograd must see, the tokens of ``core.comm.async_pairs``, are passed separately.
    """

    def __init__(
        self, tickets: Sequence[tuple[Ticket, ...]], orders: Sequence[ExpertOrder], *, keep_indices: bool
    ) -> None:
        """Create it from tickets and orders, one per slice.

        keep_indices: a recomputed unit keeps the orders, so that reading them does not trigger the recomputation.
        """
        self._tickets = tuple(tickets)
        self._orders = tuple(orders)
        self._keep_indices = keep_indices

    def finish(self, number: int, tokens: Sequence[Tensor]) -> Tensor:
        """Wait for slice ``number``, whose pieces have these autograd tokens, and sum each token's rows: [T, H]."""
        rows = [wait(token, ticket) for token, ticket in zip(tokens, self._tickets[number], strict=True)]  # [8]
        # In a recomputed unit's backward, the gradients of all slices are then sent before the unit runs again.
        with kept_as_it_is() if self._keep_indices else nullcontext():
            return unpermute(rows[0] if len(rows) == 1 else torch.cat(rows), self._orders[number])


@dataclass(frozen=True)
class _Tickets:
    """The tickets of combines, per slice. Not a pytree, like ``PendingCombines``."""

    by_slice: tuple[tuple[Ticket, ...], ...]


@dataclass
class _Slice:
    """A slice between its router and its combine: the input of its shared experts and its dispatch."""

    shared_BsH: Tensor
    dispatch: FinishedDispatch | DeferredDispatch


# (tickets of the combines, their autograd tokens, shared experts' outputs), each per slice
_Worked = tuple[_Tickets, list[tuple[Tensor, ...]], list[Tensor | None]]


class _PieceWork:
    """One piece of a slice on its way through the experts; call the methods in order. piece: its number."""

    def __init__(self, passage: Passage, one: _Slice, piece: int, token: Tensor) -> None:
        self._passage, self._dispatch, self._piece, self._token = passage, one.dispatch, piece, token
        self._dispatcher, self.plan = passage.dispatcher, one.dispatch.plans[piece]

    def enter(self) -> None:
        """Wait for the rows and launch the copy or all-gather to the ranks that share the experts."""
        received_RH, self._weights_R = self._dispatch.wait(self._piece, self._token)  # [4]
        self._entering = self._dispatcher.start_enter(received_RH)
        self._dispatch.launch_next()  # if pieces are chained, the next one is launched after this collective

    def compute(self, compute: Compute, by_expert: Sequence[ComputeOne]) -> None:
        """Compute the experts. by_expert: a function per expert, for a piece with rows of one expert only."""
        plan = self.plan
        rows_RH = self._dispatcher.wait_enter(self._entering, plan)  # [5]
        weights_R = self._weights_R if self._dispatcher.weighs_inside else None
        if plan.counts is None:
            out_RH = by_expert[plan.expert](rows_RH, weights_R)
        else:
            sizes = self._passage.experts.host_sizes(plan.counts, plan.sizes, len(rows_RH), self._passage.replay)
            out_RH = compute(rows_RH, plan.counts, sizes, weights_R, plan.ends)
        self._leaving = self._dispatcher.start_leave(out_RH, plan)  # [6]

    def combine(self) -> PendingRows:
        """Launch the combine of the outputs, multiplied by the gate weights here if not by the experts."""
        out_RH = self._dispatcher.wait_leave(self._leaving, self.plan)  # [7]
        if not self._dispatcher.weighs_inside:
            out_RH = weigh(out_RH, self._weights_R)
        return self._dispatcher.start_combine(out_RH, self.plan, self._passage.ends_unit)


class Passage:
    """One micro-batch in one layer: call ``send`` for every slice in order, then ``work``, then ``stats``.

    Attributes:
        router, experts: Of the layer.
        routing: Decides which pairs are kept, and computes the statistics.
        dispatcher: Sends tokens to their experts.
        slicing: The number of slices, and what is overlapped with what.
        replay: Of the recomputed unit that contains the layer; its recomputation reuses the forward's splits and
            exchanges no counts.
        ends_unit: Of the recomputed unit that ends with this layer; its recomputation does not send combines.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: nn.Module | None,
        slots: ExpertSlots,
        *,
        routing: MicroBatchRouting,
        dispatcher: Dispatcher,
        slicing: Slicing,
        replay: Replay | None,
        ends_unit: Replay | None,
    ) -> None:
        self.router, self.experts, self._shared, self._slots = router, experts, shared, slots
        self.routing, self.dispatcher, self.slicing = routing, dispatcher, slicing
        self.ends_unit, self.replay = ends_unit, replay
        self._slices: list[_Slice] = []
        self._device = dispatcher.comm.device

    def send(self, x_BsH: Tensor, valid_Bs: Tensor | None) -> None:
        """Route the next slice and dispatch its tokens.

        On an async device with several slices, the message is launched when the next slice is sent. By then the next
        slice's attention is queued, so the device has work while the host waits for the counts of this slice. In the
        autograd graph the message keeps its place here.
        """
        self._launch_last()
        batch, length, _ = x_BsH.shape
        valid_T = None if valid_Bs is None else valid_Bs.flatten()
        wide_TH, x_TH, shared_TH = self.router.fan_out(x_BsH.flatten(0, 1))
        routing = self.router(wide_TH, valid_T, batch)  # [1]
        kept_Tk = self.routing.keep(routing, valid_T, batch, length)  # [2]
        sizes = self.routing.sizes
        weights_Tk = gate_weights(
            routing,
            kept_Tk,
            over_kept=sizes.has_capacity,
            scaling=sizes.scaling,
            renormalizes=sizes.renormalizes,
        )
        even_splits, padded = self.dispatcher.even_splits, valid_T is not None
        rows, exact = self.routing.room(batch * length, even_splits=even_splits, padded=padded)
        counts_kE = routing.sums.counts if kept_Tk is None else None
        experts_Tk, counts_kE = self._slots.of(routing.experts, counts_kE)
        dispatch: FinishedDispatch | DeferredDispatch  # [3]
        if not self.slicing.active:
            plan = self.dispatcher.plan(experts_Tk, kept_Tk, rows, exact, self.replay, counts_kE)
            dispatch = FinishedDispatch(plan, *self.dispatcher.dispatch(x_TH, weights_Tk, plan))
        else:
            dispatch = DeferredDispatch(
                self.dispatcher,
                self.slicing,
                x_TH,
                weights_Tk,
                RoutedPairs(experts_Tk, kept_Tk, counts_kE),
                (rows, exact),
                self.replay,
            )
        self._slices.append(_Slice(shared_TH.view_as(x_BsH), dispatch))
        if not self._device.is_async:
            self._launch_last()

    def _launch_last(self) -> None:
        if self._slices:
            self._slices[-1].dispatch.launch()

    def work(self) -> tuple[PendingCombines, list[tuple[Tensor, ...]], list[Tensor | None]]:
        """Compute the experts of every slice; return (combines in flight, their autograd tokens, shared experts).

        Tokens and outputs of the shared experts are per slice. With one slice nothing can be overlapped: the call of
        the experts' module contains only the products, and the caller computes the shared experts after
        ``PendingCombines.finish``.
        """
        self._launch_last()
        tokens = [one.dispatch.tokens for one in self._slices]
        experts = self.experts
        if self.slicing.active:
            tickets, combines, shared = experts(self._work_inside, *tokens)
        else:
            tickets, combines, shared = self._work(lambda *rows: experts(_compute, *rows), [], tokens)
        orders = [one.dispatch.order for one in self._slices]
        return PendingCombines(tickets.by_slice, orders, keep_indices=self.slicing.active), combines, shared

    def _work_inside(self, experts: Experts, *tokens: tuple[Tensor, ...]) -> _Worked:
        """Compute all slices in one call of the experts' module, so that FSDP unshards the weights once."""
        return self._work(experts.compute, experts.per_expert() if self.slicing.expert_pieces else [], tokens)

    def _work(
        self,
        compute: Compute,
        by_expert: Sequence[ComputeOne],
        tokens: Sequence[tuple[Tensor, ...]],
    ) -> _Worked:
        """Compute every piece of every slice. tokens: the autograd tokens of each slice's messages."""
        sent: list[list[PendingRows]] = [[] for _ in self._slices]
        shared: list[Tensor | None] = [None] * len(self._slices)
        jobs = [(c, p) for c, one in enumerate(self._slices) for p in range(len(one.dispatch.plans))]
        pieces = [_PieceWork(self, self._slices[c], p, tokens[c][p]) for c, p in jobs]
        ahead, entered = self._pieces_ahead(), 0

        def combine(number: int) -> None:
            c, p = jobs[number]
            sent[c].append(pieces[number].combine())
            if self.slicing.active and p == len(self._slices[c].dispatch.plans) - 1:
                shared[c] = self.shared_experts(c)

        for number, piece in enumerate(pieces):
            while entered <= min(number + ahead, len(pieces) - 1):
                pieces[entered].enter()
                entered += 1
            piece.compute(compute, by_expert)
            if number >= ahead:
                combine(number - ahead)
        for number in range(len(pieces) - ahead, len(pieces)):
            combine(number)
        tickets = _Tickets(tuple(tuple(ticket for _, ticket in pending) for pending in sent))
        return tickets, [tuple(token for token, _ in pending) for pending in sent], shared

    def shared_experts(self, number: int, onto: Tensor | None = None) -> Tensor | None:
        """Return the output of the shared experts for slice ``number``, [B, s, H]; None if there are none.

        onto: A sum [T, H] to add the output to, which is returned in its place; it may change.
        """
        if self._shared is None:
            return None
        x = self._slices[number].shared_BsH
        y: Tensor
        if onto is not None and getattr(self._shared, "adds_onto", False):
            y = self._shared(x, self.ends_unit, onto)
            return y
        y = self._shared(x) if self.ends_unit is None else self._shared(x, self.ends_unit)
        return y if onto is None else onto + y.flatten(0, -2)

    def _pieces_ahead(self) -> int:
        """Return the number of pieces that enter ahead of the computation, to hide collectives over emp.

        Without such collectives it would only delay a piece's combine and wait early for the next one's rows.
        """
        slicing = self.slicing
        if self.dispatcher.emp.size == 1:
            return 0
        if slicing.chained and not self._device.is_async:
            return 0  # a CPU chains by waiting, and would wait for the next rows before computing these
        return 1 if slicing.overlap_mp or slicing.expert_pieces else 0

    def stats(self) -> MoeStats:
        """Return the statistics of the micro-batch; call it after ``work``."""
        return self.routing.stats()


def _compute(experts: Experts, *rows: Any) -> Tensor:
    return experts.compute(*rows)
