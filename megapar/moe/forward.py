"""The forward of one micro-batch through an MoE layer, slice by slice; the layer without slices has one.

Every slice takes the same steps (``^`` launch, ``v`` wait; the numbers mark the lines that perform them):

    [1] route   [2] keep   [3] D^ dispatch   [4] Dv  E^ enter   [5] Ev   [6] exp experts  L^ leave   [7] Lv  C^ combine
    [8] Cv  sum each token's rows; sh: the shared experts

Program order of one slice, where every wait follows its launch, and of d slices, where the collectives of one slice are
hidden under the computation of others:

    1 2 3 4 5 6 7 8 sh
    dispatch(0) 1 2 D0^  dispatch(1) 1 2 D1^ ... |  D0v exp0 C0^ sh0  D1v exp1 C1^ sh1 ... |  C0v C1v ...

With pieces (pipe-experts), every D, exp and C of a slice is several: one per local expert and part of its rows. With
pieces, and with ``overlap_mp``, the experts' collectives over emp, if there are any, are hidden, too:

    D0v E0^ | D1v E1^ E0v exp0 L0^ | D2v E2^ E1v exp1 L1^ L0v C0^ | ...

The backward is not written out: the start/wait pairs make it the mirror image.

Shape letters: B samples, s positions of a slice on this rank, T = B·s tokens, H hidden, E experts, k choices per token,
R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megapar.core.comm.async_pairs import Ticket, defer, wait
from megapar.core.recompute.replay import Replay, kept_as_it_is, once
from megapar.moe.dispatcher import Dispatcher, DispatchPlan, PendingRows, RoutedPairs
from megapar.moe.expert_order import ExpertOrder, unpermute, weigh
from megapar.moe.experts import Experts
from megapar.moe.micro_batch import MicroBatchRouting
from megapar.moe.placement import ExpertSlots
from megapar.moe.router import Router, gate_weights
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats

T = TypeVar("T")
RunExperts = Callable[..., Tensor]  # as ``Experts.compute``
RunExpert = Callable[[Tensor, Tensor | None], Tensor]  # as of ``Experts.per_expert``


class ImmediateDispatch:
    """A completed dispatch of one piece, used as a ``DeferredDispatch``. Its handle is the rows themselves."""

    def __init__(
        self,
        dispatcher: Dispatcher[Any],
        x_TH: Tensor,
        weights_Tk: Tensor,
        pairs: RoutedPairs,
        room: tuple[int, bool],
        replay: Replay | None,
    ) -> None:
        plan: DispatchPlan = dispatcher.plan(pairs, *room, replay)
        rows_RH, self._weights_R = dispatcher.dispatch(x_TH, weights_Tk, plan)
        self.plans, self.handles = (plan,), (rows_RH,)

    def launch(self) -> None:
        """Do nothing: the message was launched."""

    def wait(self, piece: int, handle: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, weights [R]) as received. handle: The element of ``handles``, after the experts' hooks."""
        return handle, self._weights_R

    def launch_next(self) -> None:
        """Do nothing: there is one piece only."""


class DeferredDispatch:
    """A dispatch that enters the autograd graph when it is created, and is launched later.

    Attributes:
        plans: One per piece, in the order in which they are sent; empty before the launch.
        handles: The tensors through which autograd connects the dispatch with the experts; one per piece.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[Any],
        slicing: Slicing,
        x_TH: Tensor,
        weights_Tk: Tensor,
        pairs: RoutedPairs,
        room: tuple[int, bool],
        replay: Replay | None,
    ) -> None:
        """Insert the node into the graph and launch the exchange of counts, if any.

        Args:
            room: (rows, exact) of ``Dispatcher.plan``.
            replay: Of the recomputed unit that contains the layer; its recomputation reuses the forward's plans and
                exchanges no counts.
        """
        self.plans: tuple[DispatchPlan, ...] = ()
        self._dispatcher, self._slicing, self._replay = dispatcher, slicing, replay
        self._pairs, self._room = pairs, room
        self._hidden, self._weight_dtype = x_TH.shape[1], weights_Tk.dtype
        self._device = dispatcher.comm.device
        count = slicing.expert_pieces * (dispatcher.num_experts // dispatcher.ep.size) or 1
        self.handles, self._deferred = defer((x_TH, weights_Tk), count, dispatcher.comm)
        self._routed = self._device.event()
        self._counted: Any = None
        if (dispatcher.exchanges_counts or slicing.expert_pieces) and not (replay is not None and replay.recomputing):
            is_async, pieces = self._device.is_async, slicing.expert_pieces
            self._counted = self._on_ep_stream(lambda: dispatcher.count(pairs, pieces, on_side_stream=is_async))

    def launch(self) -> None:
        """Plan and launch the message, unless it has been launched; the host waits for the counts."""
        if self.plans:
            return
        self.plans = self._on_ep_stream(lambda: once(self._replay, self._plan))
        message = self._dispatcher.message(self.plans[0], self._hidden, self._weight_dtype)
        rows = [self.plans[0].send_order.pair.shape[0]]
        if len(self.plans) > 1:
            rows = [sum(plan.exchange.send or ()) for plan in self.plans]
        exchanges = [plan.exchange for plan in self.plans]
        after = self._routed if self._device.is_async else None
        self._deferred.launch(message, exchanges, rows, after, first_only=self._slicing.chained)

    def wait(self, piece: int, handle: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, weights [R]) of a piece. handle: Its element of ``handles``, after the experts' hooks."""
        sent = handle, self._deferred.tickets[piece]
        return self._dispatcher.wait_dispatch(sent, self.plans[piece], self._hidden, self._weight_dtype)

    def launch_next(self) -> None:
        """Launch the next piece, if pieces are chained."""
        self._deferred.send_next()

    def _on_ep_stream(self, op: Callable[[], T]) -> T:
        """Run an operation that only the dispatch needs: after the router, on ep's stream if the device has streams."""
        if not self._device.is_async:
            return op()
        result = self._device.launch(op, self._dispatcher.comm.stream(self._dispatcher.ep), self._routed)
        for leaf in _device_tensors(result):
            self._device.adopt(leaf)
        return result

    def _plan(self) -> tuple[DispatchPlan, ...]:
        counted, self._counted = self._counted, None
        if counted is not None:
            return self._dispatcher.plan_counted(counted, self._slicing.expert_pieces)
        return (self._dispatcher.plan(self._pairs, *self._room),)


def _device_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all device tensors of counts, and of plans, in nested tuples."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            yield value
    elif isinstance(value, tuple | DispatchPlan):
        for item in value if isinstance(value, tuple) else vars(value).values():
            yield from _device_tensors(item)


class PendingCombines:
    """The combines of a layer's slices, in flight. Deliberately not a pytree, so that hooks, casts and copies skip it.

    The tensors that autograd must see, the handles of ``start``, are passed separately. If ``keep_indices``, a
    recomputed unit keeps the orders, so that reading them does not trigger the recomputation.
    """

    def __init__(
        self, tickets: Sequence[tuple[Ticket, ...]], orders: Sequence[ExpertOrder], *, keep_indices: bool
    ) -> None:
        self._tickets, self._orders, self._keep_indices = tuple(tickets), tuple(orders), keep_indices

    def finish(self, number: int, handles: Sequence[Tensor]) -> Tensor:
        """Wait for the pieces of slice ``number``, which have these handles, and sum each token's rows: [T, H]."""
        rows = [wait(handle, ticket) for handle, ticket in zip(handles, self._tickets[number], strict=True)]  # [8]
        # In a recomputed unit's backward, the gradients of all slices are then sent before the unit runs again.
        with kept_as_it_is() if self._keep_indices else nullcontext():
            return unpermute(rows[0] if len(rows) == 1 else torch.cat(rows), self._orders[number])


# (combines, their handles, shared experts' outputs); handles and outputs per slice
Computed = tuple[PendingCombines, list[tuple[Tensor, ...]], list[Tensor | None]]


class _PieceWork:
    """One piece of a slice on its way through the experts; call the methods in order."""

    def __init__(
        self, forward: MoeForward, dispatch: ImmediateDispatch | DeferredDispatch, piece: int, handle: Tensor
    ) -> None:
        self._forward, self._dispatch, self._piece, self._handle = forward, dispatch, piece, handle
        self._dispatcher, self._plan = forward.dispatcher, dispatch.plans[piece]

    def enter(self) -> None:
        """Wait for the rows and launch the copy or all-gather to the ranks that share the experts."""
        received_RH, self._weights_R = self._dispatch.wait(self._piece, self._handle)  # [4]
        self._entering = self._dispatcher.start_enter(received_RH)
        self._dispatch.launch_next()  # if pieces are chained, the next one is launched after this collective

    def run(self, run_experts: RunExperts, by_expert: Sequence[RunExpert]) -> None:
        """Run the experts. by_expert: A function per expert, for a piece with rows of one expert only."""
        plan = self._plan
        rows_RH = self._dispatcher.wait_enter(self._entering, plan)  # [5]
        weights_R = self._weights_R if self._dispatcher.experts_apply_gate_weights else None
        if plan.counts is None:
            out_RH = by_expert[plan.expert](rows_RH, weights_R)
        else:
            sizes = self._forward.experts.host_sizes(plan.counts, plan.sizes, len(rows_RH), self._forward.replay)
            out_RH = run_experts(rows_RH, plan.counts, sizes, weights_R, plan.ends)
        self._leaving = self._dispatcher.start_leave(out_RH, plan)  # [6]

    def combine(self) -> PendingRows:
        """Launch the combine of the outputs, multiplied by the gate weights here if not by the experts."""
        out_RH = self._dispatcher.wait_leave(self._leaving, self._plan)  # [7]
        if not self._dispatcher.experts_apply_gate_weights:
            out_RH = weigh(out_RH, self._weights_R)
        return self._dispatcher.start_combine(out_RH, self._plan, self._forward.ends_unit)


@dataclass(frozen=True, eq=False, kw_only=True)
class MoeForward:
    """One micro-batch in one layer: ``dispatch`` for every slice in order, then ``compute_experts``, then ``stats``.

    Attributes:
        routing: Decides which pairs are kept, and computes the statistics.
        slicing: The number of slices, and what is overlapped with what.
        replay: Of the recomputed unit that contains the layer; its recomputation reuses the forward's splits and
            exchanges no counts.
        ends_unit: Of the recomputed unit that ends with this layer; its recomputation does not send combines.
    """

    router: Router
    experts: Experts
    shared: nn.Module | None
    slots: ExpertSlots
    routing: MicroBatchRouting
    dispatcher: Dispatcher[Any]
    slicing: Slicing
    replay: Replay | None
    ends_unit: Replay | None
    _dispatches: list[ImmediateDispatch | DeferredDispatch] = field(default_factory=list, init=False)
    _shared_inputs: list[Tensor] = field(default_factory=list, init=False)

    def dispatch(self, x_BsH: Tensor, valid_Bs: Tensor | None) -> None:
        """Route the next slice, decide which of its pairs are kept, and dispatch its tokens.

        On an async device with several slices, the message is launched when the next slice is dispatched. By then the
        next slice's attention is queued, so the device has work while the host waits for the counts of this slice. In
        the autograd graph the message keeps its place here.
        """
        self._launch_last()
        batch, length, _ = x_BsH.shape
        valid_T = None if valid_Bs is None else valid_Bs.flatten()
        x_TH = shared_TH = x_BsH.flatten(0, 1)
        routing = self.router(x_TH, valid_T, batch)  # [1]
        if routing.passed is not None:
            x_TH, shared_TH = routing.passed
        kept_Tk = self.routing.keep(routing, valid_T, batch, length)  # [2]
        sizes = self.routing.sizes
        weights_Tk = gate_weights(
            routing, kept_Tk, over_kept=sizes.has_capacity, scaling=sizes.scaling, renormalizes=sizes.renormalizes
        )
        even_splits, padded = self.dispatcher.even_splits, valid_T is not None
        room = self.routing.room(batch * length, even_splits=even_splits, padded=padded)
        counts_kE = routing.sums.counts if kept_Tk is None else None
        experts_Tk, counts_kE = self.slots.of(routing.experts, counts_kE)
        message = x_TH, weights_Tk, RoutedPairs(experts_Tk, kept_Tk, counts_kE), room, self.replay
        if self.slicing.active:
            self._dispatches.append(DeferredDispatch(self.dispatcher, self.slicing, *message))  # [3]
        else:
            self._dispatches.append(ImmediateDispatch(self.dispatcher, *message))  # [3]
        self._shared_inputs.append(shared_TH.view_as(x_BsH))
        if not self.dispatcher.comm.device.is_async:
            self._launch_last()

    def _launch_last(self) -> None:
        if self._dispatches:
            self._dispatches[-1].launch()

    def compute_experts(self) -> Computed:
        """Compute the experts of every slice; return (combines in flight, their handles, shared experts' outputs).

        With one slice nothing can be overlapped: the call of the experts' module contains only the products, and the
        caller computes the shared experts after ``PendingCombines.finish``.
        """
        self._launch_last()
        handles = [dispatch.handles for dispatch in self._dispatches]
        if self.slicing.active:
            return self.experts(self._slices_in_one_call, *handles)

        def in_one_call(*rows: Any) -> Tensor:
            return self.experts(lambda experts, *entered: experts.compute(*entered), *rows)

        return self._run_pieces(in_one_call, [], handles)

    def _slices_in_one_call(self, experts: Experts, *handles: tuple[Tensor, ...]) -> Computed:
        """Compute all slices in one call of the experts' module, so that FSDP unshards the weights once."""
        return self._run_pieces(experts.compute, experts.per_expert() if self.slicing.expert_pieces else [], handles)

    def _run_pieces(
        self, run_experts: RunExperts, by_expert: Sequence[RunExpert], handles: Sequence[tuple[Tensor, ...]]
    ) -> Computed:
        """Compute every piece of every slice."""
        sent: list[list[PendingRows]] = [[] for _ in handles]
        shared: list[Tensor | None] = [None] * len(handles)
        numbers = [(s, p) for s, dispatch in enumerate(self._dispatches) for p in range(len(dispatch.plans))]
        pieces = [_PieceWork(self, self._dispatches[s], p, handles[s][p]) for s, p in numbers]
        lookahead, next_to_enter = self._lookahead(), 0

        def combine(number: int) -> None:
            slice_index, piece_index = numbers[number]
            sent[slice_index].append(pieces[number].combine())
            if self.slicing.active and piece_index == len(self._dispatches[slice_index].plans) - 1:
                shared[slice_index] = self.shared_experts(slice_index)

        for number, piece in enumerate(pieces):
            while next_to_enter <= min(number + lookahead, len(pieces) - 1):
                pieces[next_to_enter].enter()
                next_to_enter += 1
            piece.run(run_experts, by_expert)
            if number >= lookahead:
                combine(number - lookahead)
        for number in range(len(pieces) - lookahead, len(pieces)):
            combine(number)
        tickets = [tuple(ticket for _, ticket in pending) for pending in sent]
        orders = [dispatch.plans[0].send_order for dispatch in self._dispatches]
        combines = PendingCombines(tickets, orders, keep_indices=self.slicing.active)
        return combines, [tuple(handle for handle, _ in pending) for pending in sent], shared

    def shared_experts(self, number: int, onto: Tensor | None = None) -> Tensor | None:
        """Return the output of the shared experts for slice ``number``, [B, s, H]; None if there are none.

        onto: A sum [T, H] to add the output to, which is returned in its place; it may change.
        """
        if self.shared is None:
            return None
        x = self._shared_inputs[number]
        if onto is not None and getattr(self.shared, "adds_onto", False):
            return self.shared(x, self.ends_unit, onto)
        y: Tensor = self.shared(x) if self.ends_unit is None else self.shared(x, self.ends_unit)
        return y if onto is None else onto + y.flatten(0, -2)

    def _lookahead(self) -> int:
        """Return the number of pieces that enter ahead of the computation, to hide collectives over emp.

        Without such collectives it would only delay a piece's combine and wait early for the next one's rows.
        """
        slicing = self.slicing
        if self.dispatcher.emp.size == 1:
            return 0
        if slicing.chained and not self.dispatcher.comm.device.is_async:
            return 0  # a CPU chains by waiting, and would wait for the next rows before computing these
        return 1 if slicing.overlap_mp or slicing.expert_pieces else 0

    def stats(self) -> MoeStats:
        """Return the statistics of the micro-batch; call it after ``compute_experts``."""
        return self.routing.stats()
