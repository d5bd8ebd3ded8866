"""Dispatch of the tokens of one slice: at once, or with a launch deferred until the splits are known.

    FinishedDispatch    plan, launch and wait; for a layer of one slice, which cannot hide the message
    DeferredDispatch    the message's node is in the graph where the slice is routed; its counts are exchanged, it is
                        launched with the next slice, and waited for just before its experts compute

Shape letters: T tokens, k choices per token, H hidden, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from megapar.core.comm.async_pairs import defer
from megapar.core.recompute.replay import Replay, once
from megapar.moe.dispatcher import Dispatcher, DispatchPlan, RoutedPairs
from megapar.moe.expert_order import ExpertOrder
from megapar.moe.slicing import Slicing

T = TypeVar("T")


class FinishedDispatch:
    """A completed dispatch of one piece.

    Attributes:
        plans: The plan of its one piece.
        order: Pairs to rows, as sent.
        tokens: The tensors through which autograd connects the dispatch with the experts: here the rows themselves.
    """

    def __init__(self, plan: DispatchPlan, rows_RH: Tensor, weights_R: Tensor) -> None:
        self.plans, self.order, self.tokens = (plan,), plan.send_order, (rows_RH,)
        self._weights_R = weights_R

    def launch(self) -> None:
        """Do nothing: the message was launched."""

    def wait(self, piece: int, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, weights [R]) as received. token: the element of ``tokens``, after the experts' hooks."""
        return token, self._weights_R

    def launch_next(self) -> None:
        """Do nothing: there is one piece only."""


class DeferredDispatch:
    """A dispatch that enters the autograd graph when it is created, and is launched later.

    Attributes:
        plans: One per piece, in the order in which they are sent; empty before the launch.
        tokens: The tensors through which autograd connects the dispatch with the experts; one per piece.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        slicing: Slicing,
        x_TH: Tensor,
        weights_Tk: Tensor,
        pairs: RoutedPairs,
        room: tuple[int, bool],
        replay: Replay | None,
    ) -> None:
        """Insert the node into the graph and launch the exchange of counts, if any.

        Args:
            dispatcher: Plans and sends the message.
            slicing: The number of pieces of the message, and their chaining.
            x_TH: Tokens of the slice.
            weights_Tk: Gate weights.
            pairs: The pairs to dispatch.
            room: (rows, exact) of ``Dispatcher.plan``.
            replay: Of the recomputed unit that contains the layer; its recomputation reuses the forward's plans and
                exchanges no counts.
        """
        self.plans: tuple[DispatchPlan, ...] = ()
        self._dispatcher, self._slicing, self._replay = dispatcher, slicing, replay
        self._pairs, self._room = pairs, room
        self._hidden, self._weight_dtype = x_TH.shape[1], weights_Tk.dtype
        self._order: ExpertOrder | None = None
        self._device = dispatcher.comm.device
        count = slicing.expert_pieces * (dispatcher.num_experts // dispatcher.ep.size) or 1
        self.tokens, self._deferred = defer((x_TH, weights_Tk), count, dispatcher.comm)
        self._routed = self._device.event()
        self._counted: Any = None
        if (dispatcher.exchanges_counts or slicing.expert_pieces) and not (replay is not None and replay.recomputing):
            self._counted = self._on_ep_stream(self._exchange_counts)

    @property
    def order(self) -> ExpertOrder:
        """Pairs to rows, as sent; available after the launch."""
        assert self._order is not None
        return self._order

    def launch(self) -> None:
        """Plan and launch the message, unless it has been launched; the host waits for the counts."""
        if self.plans:
            return
        self._order, self.plans = self._on_ep_stream(lambda: once(self._replay, self._plan))
        message = self._dispatcher.message(self._order, self.plans[0], self._hidden, self._weight_dtype)
        rows = [self._order.pair.shape[0]]
        if len(self.plans) > 1:
            rows = [sum(plan.exchange.send or ()) for plan in self.plans]
        exchanges = [plan.exchange for plan in self.plans]
        after = self._routed if self._device.is_async else None
        self._deferred.launch(message, exchanges, rows, after, first_only=self._slicing.chained)

    def wait(self, piece: int, token: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows, weights [R]) of a piece as received.

        token: the piece's element of ``tokens``, after the experts' hooks.
        """
        sent = token, self._deferred.tickets[piece]
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

    def _exchange_counts(self) -> Any:
        return self._dispatcher.count(self._pairs, self._slicing.expert_pieces, aside=self._device.is_async)

    def _plan(self) -> tuple[ExpertOrder, tuple[DispatchPlan, ...]]:
        counted, self._counted = self._counted, None
        if counted is not None:
            return self._dispatcher.plan_counted(counted, self._slicing.expert_pieces)
        pairs = self._pairs
        plan = self._dispatcher.plan(pairs.experts, pairs.kept, *self._room, counts_kE=pairs.counts)
        return plan.send_order, (plan,)


def _device_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all device tensors in nested tuples of plans and counts."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _device_tensors(item)
