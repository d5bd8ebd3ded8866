"""How the tokens of one slice are dispatched: at once, or with a launch that is deferred until the splits are known.

    FinishedDispatch    plan, launch and wait; for a layer of one slice, which has nothing to hide the message under
    DeferredDispatch    the node of the message is in the graph where the slice is routed; counts travel, the message is
                        launched with the next slice, and waited for when the experts come to it

Shape letters: T tokens, k choices per token, H hidden, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from megapar.core.comm.async_pairs import defer
from megapar.core.recompute.replay import Replay, once
from megapar.moe.expert_order import ExpertOrder
from megapar.moe.message import RowsOfTokens
from megapar.moe.pieces import piece_plans
from megapar.moe.slicing import Slicing
from megapar.moe.token_dispatcher import DispatchPlan, RowCounts, TokenDispatcher

T = TypeVar("T")


class FinishedDispatch:
    """A dispatch that has been waited for; of one piece.

    Attributes:
        plans: of its one piece.
        order: pairs to rows as they were sent.
        tokens: what brings the rows to the experts, as autograd sees it: the rows themselves.
    """

    def __init__(self, plan: DispatchPlan, rows_RH: Tensor, weights_R: Tensor) -> None:
        self.plans, self.order, self.tokens = (plan,), plan.send_order, (rows_RH,)
        self._weights_R = weights_R

    def launch(self) -> None:
        """Nothing is left to launch."""

    def wait(self, piece: int, token: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, weights [R]) as they were received; token: one of ``tokens`` after the hooks of the experts."""
        return token, self._weights_R

    def launch_next(self) -> None:
        """Nothing is left to launch."""


class DeferredDispatch:
    """A dispatch whose place in the graph is where it is made, and whose launch comes later.

    Attributes:
        plans: one per piece, in the order in which they are sent, once it has been launched.
        tokens: what brings the rows to the experts, as autograd sees it; one per piece.
    """

    def __init__(
        self,
        dispatcher: TokenDispatcher,
        slicing: Slicing,
        x_TH: Tensor,
        weights_Tk: Tensor,
        experts_Tk: Tensor,
        kept_Tk: Tensor | None,
        room: tuple[int, bool],
        replay: Replay | None,
    ) -> None:
        """Put the node into the graph and start the exchange of counts, if any.

        room: (rows, exact) of ``TokenDispatcher.plan``. replay: of the recomputed unit that the layer is in; when it
        runs again, its forward's plans are used, and no counts are exchanged.
        """
        self.plans: tuple[DispatchPlan, ...] = ()
        self._dispatcher, self._slicing, self._replay = dispatcher, slicing, replay
        self._experts_Tk, self._kept_Tk, self._room = experts_Tk, kept_Tk, room
        self._hidden, self._weight_dtype = x_TH.shape[1], weights_Tk.dtype
        self._order: ExpertOrder | None = None
        self._device = dispatcher.comm.device
        count = slicing.expert_pieces * (dispatcher.num_experts // dispatcher.ep.size) or 1
        self.tokens, self._deferred = defer((x_TH, weights_Tk), count, dispatcher.comm)
        self._routed = self._device.event()
        self._row_counts: RowCounts | None = None
        if (dispatcher.exchanges_counts or slicing.expert_pieces) and not (replay is not None and replay.again):
            self._row_counts = self._aside(self._announce)

    @property
    def order(self) -> ExpertOrder:
        """Pairs to rows as they are sent; known once it has been launched."""
        assert self._order is not None
        return self._order

    def launch(self) -> None:
        """Plan and launch the message, if that has not been done; the host waits for the counts."""
        if self.plans:
            return
        self._order, self.plans = self._aside(lambda: once(self._replay, self._plan))
        message = RowsOfTokens(self._order, self._hidden, self._weight_dtype)
        rows = [self._order.pair.shape[0]]
        if len(self.plans) > 1:
            rows = [sum(plan.exchange.send or ()) for plan in self.plans]
        exchanges = [plan.exchange for plan in self.plans]
        after = self._routed if self._device.is_async else None
        self._deferred.launch(message, exchanges, rows, after, first_only=self._slicing.chained)

    def wait(self, piece: int, token: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, weights [R]) of a piece as received; token: its one of ``tokens`` after the hooks of the experts."""
        sent = token, self._deferred.tickets[piece]
        return self._dispatcher.wait_dispatch(sent, self.plans[piece], self._hidden, self._weight_dtype)

    def launch_next(self) -> None:
        """Launch the next piece, where pieces are chained."""
        self._deferred.send_next()

    def _aside(self, op: Callable[[], T]) -> T:
        """Do what only the dispatch needs: after the router, on the stream of the axis where the device has streams."""
        if not self._device.is_async:
            return op()
        result = self._device.launch(op, self._dispatcher.comm.stream(self._dispatcher.ep), self._routed)
        for leaf in _device_tensors(result):
            self._device.adopt(leaf)
        return result

    def _announce(self) -> RowCounts:
        return self._dispatcher.announce(self._experts_Tk, self._kept_Tk, aside=self._device.is_async)

    def _plan(self) -> tuple[ExpertOrder, tuple[DispatchPlan, ...]]:
        dispatcher, row_counts = self._dispatcher, self._row_counts
        if row_counts is None:
            plan = dispatcher.plan(self._experts_Tk, self._kept_Tk, *self._room)
        elif self._slicing.expert_pieces:
            return piece_plans(dispatcher, row_counts, self._experts_Tk, self._kept_Tk, self._slicing.expert_pieces)
        else:
            plan = dispatcher.uneven_plan(row_counts, dispatcher.read(row_counts), self._experts_Tk, self._kept_Tk)
        return plan.send_order, (plan,)


def _device_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of plans and counts that are on a device, at any depth of tuples."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _device_tensors(item)
