"""The steps of every dispatch of tokens to their experts, and its plan.

    dispatch   tokens and weights to the ranks of their experts
    enter      to all ranks of emp, which have the features of the same experts
    experts
    leave      sums over emp
    combine    back to the ranks of the tokens

``TokenDispatcher`` sends a row for each (token, expert), ``NodeDispatcher`` a row for each (token, node) and from there
for each (token, rank). A backend that sends tokens in another way is a third class.

Shape letters: T tokens, k choices per token, H hidden, E experts, L experts on this rank, R rows, S ranks of emp that
gather rows (or 1), W width of a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import MessageBuilder, Ticket, start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, Copy, Reduce, ReduceScatter, RowExchange, Unsent
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.base import Event
from megapar.core.recompute.replay import Replay, once
from megapar.moe.expert_order import ExpertOrder, permute, unpermute

PendingRows = tuple[Tensor, Ticket]  # result of ``start``: the handle that autograd sees, and the ticket to wait with
READ = "Dispatcher.read"  # where the host waits for counts


class RoutedPairs(NamedTuple):
    """The (token, choice) pairs of a message, [T, k] int64.

    Attributes:
        kept: [T, k] bool; None: every pair is kept.
        counts: [k, E] int64, the kept pairs of each choice, or of all, and expert, if they have been counted.
    """

    experts: Tensor
    kept: Tensor | None
    counts: Tensor | None = None


class RowCounts(NamedTuple):
    """Numbers of rows that ranks send, exchanged and being copied to the host.

    Attributes:
        arriving: What others send: [S, ep, L] rows to each local expert, or by node [ep, S, W] whole tables.
        numbers: The numbers that the host reads: [1 + S, ep, L], its own and ``arriving``, or by node ``arriving``.
        ready: The event after which it may read them.
    """

    arriving: Tensor
    numbers: Tensor
    ready: Event


@dataclass(frozen=True)
class DispatchPlan:
    """The plan of one message: made once, used for dispatch, combine and both backwards.

    Attributes:
        send_order: Pairs to rows as sent, sorted by expert and so by rank; the same for all pieces of a message.
        received: Rows that this rank receives; by node, the pairs of the rows.
        room: Rows per rank in the all-gather over emp: the maximum that any of its ranks received.
        receive_order: Rows as received (or gathered) to rows sorted by expert; None if they are sorted already.
        counts: [L] int64, rows of each local expert after the all-gather; None if all rows are for ``expert``.
        sizes: ``counts`` on the host, if the host has them anyway.
        ends: [L] int32, the row after the last one of each local expert, if the device computed it with the order.
    """

    send_order: ExpertOrder
    exchange: RowExchange
    received: int
    room: int
    receive_order: ExpertOrder | None
    counts: Tensor | None
    expert: int = 0
    sizes: tuple[int, ...] | None = None
    ends: Tensor | None = None


Plan = TypeVar("Plan", bound=DispatchPlan)


@dataclass(frozen=True)
class Dispatcher(ABC, Generic[Plan]):
    """Dispatch to the experts and combine, over ep and emp.

    Attributes:
        emp: The axis over which the features of each expert are sharded.
        sequence_sharded: Positions are sharded over emp, and each of its ranks dispatches its own tokens; otherwise all
            ranks of emp dispatch the same tokens.
        even_splits: Use even splits; all ranks of ep and emp must then allocate the same number of rows.
        comm: Launches the collectives.
    """

    num_experts: int
    ep: Axis
    emp: Axis
    sequence_sharded: bool
    even_splits: bool
    comm: CommContext

    def plan(self, pairs: RoutedPairs, rows: int, exact: bool, replay: Replay | None = None) -> Plan:
        """Plan the dispatch of these pairs.

        Args:
            rows: With even splits, num_experts times the rows per expert. If no counts are exchanged, at least the
                number of kept pairs, so that the host need not wait for the device. The last expert computes the rows
                beyond the kept pairs as zeros; they have weight 0 and reach no token.
            exact: ``rows`` is the number of kept pairs.
            replay: Of the recomputed unit that contains the layer; its recomputation reuses the counts.
        """
        ordered = self.sort(pairs, 0)

        def count() -> tuple[RowCounts, Tensor]:
            counts = self.exchange_counts(ordered)
            return counts, self.read(ordered, counts, 0)

        return self.plans(ordered, *once(replay, count), 0)[0]

    def count(self, pairs: RoutedPairs, pieces: int, *, on_side_stream: bool = False) -> Any:
        """Sort the pairs and exchange the counts of rows, without a host wait; return what ``plan_counted`` needs.

        pieces: Messages for each local expert; 0: one message for all.
        """
        ordered = self.sort(pairs, pieces)
        return ordered, self.exchange_counts(ordered, on_side_stream=on_side_stream)

    def plan_counted(self, counted: Any, pieces: int) -> tuple[Plan, ...]:
        """Read the counts of ``count``, the only host wait; return the L · pieces plans in the order of sending."""
        ordered, counts = counted
        return self.plans(ordered, counts, self.read(ordered, counts, pieces), pieces)

    @abstractmethod
    def sort(self, pairs: RoutedPairs, pieces: int) -> Any:
        """Sort all pairs, the kept ones first, and count the rows of each destination on the device."""

    @abstractmethod
    def exchange_counts(self, ordered: Any, *, on_side_stream: bool = False) -> RowCounts:
        """Exchange the counts of rows, first over emp, then over ep, without a host wait.

        Over ep the counts queue after the dispatch of the previous slice. In the opposite order, collectives over emp
        that follow, such as the sums of the next slice, would queue after that dispatch.
        """

    def read(self, ordered: Any, counts: RowCounts, pieces: int) -> Tensor:
        """Return the counts on the host, after the only host wait."""
        counts.ready.synchronize()
        self.comm.count_host_wait(READ)
        return counts.numbers

    @abstractmethod
    def plans(self, ordered: Any, counts: RowCounts, numbers: Tensor, pieces: int) -> tuple[Plan, ...]:
        """Plan the messages, in the order in which they are sent."""

    @abstractmethod
    def message(self, plan: Plan, hidden: int, weight_dtype: torch.dtype) -> MessageBuilder:
        """Return the builder of the message from tokens [T, H] and weights [T, k]. plan: That of any of its pieces."""

    @abstractmethod
    def dispatch(self, x_TH: Tensor, weights_Tk: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Send every kept pair's token and weight to its expert, and wait as ``wait_dispatch``."""

    @abstractmethod
    def wait_dispatch(
        self, sent: PendingRows, plan: Plan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Wait for (tokens, weights): a row for each pair, and the weights in the order of what they multiply."""

    def start_enter(self, rows_RH: Tensor) -> PendingRows:
        """Launch the copy or all-gather of the rows to all ranks that share the experts."""
        return start(AllGather(self.emp) if self.gathers_rows_over_emp else Copy(self.emp), rows_RH, self.comm)

    def wait_enter(self, entering: PendingRows, plan: Plan) -> Tensor:
        """Wait for the rows and return them sorted by expert: [R, H]."""
        rows_RH = wait(*entering)
        if self.gathers_rows_over_emp and plan.receive_order is not None:
            return permute(rows_RH, plan.receive_order)
        return rows_RH

    def start_leave(self, rows_RH: Tensor, plan: Plan) -> PendingRows:
        """Launch the sum of the experts' outputs [R, H], partial sums, over the ranks that share the experts."""
        if plan.receive_order is not None:
            rows_RH = unpermute(rows_RH, plan.receive_order)
        return start(ReduceScatter(self.emp) if self.gathers_rows_over_emp else Reduce(self.emp), rows_RH, self.comm)

    def wait_leave(self, leaving: PendingRows, plan: Plan) -> Tensor:
        """Wait for the sums and return them in the order in which the rows were received: [R_in, H]."""
        rows_RH = wait(*leaving)
        return rows_RH if self.is_local or len(rows_RH) == plan.received else rows_RH[: plan.received]

    @abstractmethod
    def start_combine(self, rows_RH: Tensor, plan: Plan, ends_unit: Replay | None) -> PendingRows:
        """Send the weighted outputs [R_in, H] back to the ranks of their tokens, where ``unpermute`` sums them.

        ends_unit: Of the recomputed unit that ends with this layer; its recomputation sends nothing, since only the
        unit's output needs the result.
        """

    @property
    def is_local(self) -> bool:
        """True if all experts are on this rank, each of them whole."""
        return self.ep.size == self.emp.size == 1

    @property
    def experts_apply_gate_weights(self) -> bool:
        """True if gate weights multiply the experts' activations; False if they multiply the summed outputs.

        Activations are fewer numbers, but give the weights' whole gradient only where experts are not split.
        """
        return self.emp.size == 1

    @property
    def exchanges_counts(self) -> bool:
        """True if ranks must exchange the numbers of rows before the rows."""
        return not self.even_splits and (self.ep.size > 1 or self.gathers_rows_over_emp)

    @property
    def gathers_rows_over_emp(self) -> bool:
        """True if each rank of emp receives different rows, which all of its ranks need."""
        return self.sequence_sharded and self.emp.size > 1


def unsent_if_unused(back: RowExchange, ends_unit: Replay | None) -> RowExchange | Unsent:
    """Return the exchange of a combine, unsent in the recomputation of the unit that ends with its layer.

    The backward may need the rows sent, for the weights, but not those received.
    """
    return Unsent(back) if ends_unit is not None and ends_unit.recomputing else back
