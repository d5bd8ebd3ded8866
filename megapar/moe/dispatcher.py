"""The steps of every dispatch of tokens to their experts, and its plan.

    dispatch   tokens and weights to the ranks of their experts
    enter      to all ranks of emp, which have the features of the same experts
    experts
    leave      sums over emp
    combine    back to the ranks of the tokens

``TokenDispatcher`` sends a row for each (token, expert), ``NodeDispatcher`` a row for each (token, node) and from there
for each (token, rank). A backend that sends tokens in another way is a third class.

Shape letters: T tokens, k choices per token, H hidden, E experts, L experts on this rank, R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.core.comm.async_pairs import MessageBuilder, Ticket, start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, Copy, Reduce, ReduceScatter, RowExchange, Unsent
from megapar.core.comm.in_flight import CommContext
from megapar.core.recompute.replay import Replay
from megapar.moe.expert_order import ExpertOrder, permute, unpermute
from megapar.moe.node_route import NodeRoute

PendingRows = tuple[Tensor, Ticket]  # result of ``start``: the token that autograd sees, and the ticket to wait with
READ = "TokenDispatcher.read"  # where the host waits for counts


class RoutedPairs(NamedTuple):
    """The (token, choice) pairs of a message.

    Attributes:
        experts: [T, k] int64, the experts of each token.
        kept: [T, k] bool; None: every pair is kept.
        counts: [k, E] int64, the kept pairs of each choice, or of all, and expert, if they have been counted.
    """

    experts: Tensor
    kept: Tensor | None
    counts: Tensor | None = None


class DispatchPlan(NamedTuple):
    """The plan of one message: made once, used for dispatch, combine and both backwards.

    Attributes:
        send_order: Pairs to rows as sent, sorted by expert and therefore by rank.
        exchange: The exchange over ep.
        received: Rows that this rank receives; by node, the pairs of the rows.
        room: Rows per rank in the all-gather over emp: the maximum that any of its ranks received.
        receive_order: Rows as received (or gathered) to rows sorted by expert; None if they are sorted already.
        counts: [L] int64, rows of each local expert after the all-gather; None if all rows are for ``expert``.
        expert: The only expert of this message, if ``counts`` is None.
        sizes: ``counts`` on the host, if the host has them anyway.
        ends: [L] int32, the row after the last one of each local expert, if the device computed it with the order.
        row_experts: [R_out, k] int16, the experts of each row sent; by node only.
        choices: [T, k] int64, each token's choices, sorted by expert, as ``send_order`` has them; by node only.
        route: How rows are relayed, and their order here; by node only.
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
    row_experts: Tensor | None = None
    choices: Tensor | None = None
    route: NodeRoute | None = None


@dataclass(frozen=True)
class Dispatcher(ABC):
    """Dispatch to the experts and combine, over ep and emp.

    Attributes:
        num_experts: E, over all ranks.
        ep: The expert parallel axis, with E / ep experts on each rank.
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

    @abstractmethod
    def plan(
        self,
        experts_Tk: Tensor,
        kept_Tk: Tensor | None,
        rows: int,
        exact: bool,
        replay: Replay | None = None,
        counts_kE: Tensor | None = None,
    ) -> DispatchPlan:
        """Plan the dispatch of these pairs.

        Args:
            experts_Tk: The experts of each token.
            kept_Tk: bool; None: every pair is kept.
            rows: With even splits, num_experts times the rows per expert. If no counts are exchanged, at least the
                number of kept pairs, so that the host need not wait for the device. The last expert computes the rows
                beyond the kept pairs as zeros; they have weight 0 and reach no token.
            exact: ``rows`` is the number of kept pairs.
            replay: Of the recomputed unit that contains the layer; its recomputation reuses the counts.
            counts_kE: The kept pairs of each choice, or of all, and expert, if they have been counted.
        """

    @abstractmethod
    def count(self, pairs: RoutedPairs, pieces: int, *, aside: bool = False) -> Any:
        """Sort the pairs and exchange the counts of rows, without a host wait; return what ``plan_counted`` needs.

        Args:
            pieces: Messages for each local expert; 0: one message for all.
            aside: The current stream is not the main one.
        """

    @abstractmethod
    def plan_counted(self, counted: Any, pieces: int) -> tuple[ExpertOrder, tuple[DispatchPlan, ...]]:
        """Read the counts, the only host wait; return (order of the whole message, the plans of its pieces).

        Args:
            counted: From ``count``.
            pieces: As there. The L · pieces plans are in the order in which they are sent.
        """

    @abstractmethod
    def message(self, order: ExpertOrder, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype) -> MessageBuilder:
        """Return the builder of the message from tokens [T, H] and weights [T, k].

        Args:
            order: Pairs to rows, as sent.
            plan: The plan of its first piece.
            hidden: H.
        """

    @abstractmethod
    def dispatch(self, x_TH: Tensor, weights_Tk: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor]:
        """Send every kept pair's token and weight to its expert; return the result of ``wait_dispatch``."""

    @abstractmethod
    def wait_dispatch(
        self, sent: PendingRows, plan: DispatchPlan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Wait for (tokens, weights): a row for each pair that ``start_enter`` takes, in its order.

        Weights are in the order of the rows that they multiply (``weighs_inside``).
        """

    def start_enter(self, rows_RH: Tensor) -> PendingRows:
        """Launch the copy or all-gather of the rows to all ranks that share the experts."""
        return start(AllGather(self.emp) if self.gathers else Copy(self.emp), rows_RH, self.comm)

    def wait_enter(self, entering: PendingRows, plan: DispatchPlan) -> Tensor:
        """Wait for the rows and return them sorted by expert: [R, H]."""
        rows_RH = wait(*entering)
        if self.gathers and plan.receive_order is not None:
            return permute(rows_RH, plan.receive_order)
        return rows_RH

    def start_leave(self, rows_RH: Tensor, plan: DispatchPlan) -> PendingRows:
        """Launch the sum of the experts' outputs [R, H], partial sums, over the ranks that share the experts."""
        if plan.receive_order is not None:
            rows_RH = unpermute(rows_RH, plan.receive_order)
        return start(ReduceScatter(self.emp) if self.gathers else Reduce(self.emp), rows_RH, self.comm)

    def wait_leave(self, leaving: PendingRows, plan: DispatchPlan) -> Tensor:
        """Wait for the sums and return them in the order in which the rows were received: [R_in, H]."""
        rows_RH = wait(*leaving)
        return rows_RH if self.is_local or len(rows_RH) == plan.received else rows_RH[: plan.received]

    @abstractmethod
    def start_combine(self, rows_RH: Tensor, plan: DispatchPlan, ends_unit: Replay | None) -> PendingRows:
        """Send the weighted outputs [R_in, H] back to the ranks of their tokens, where ``unpermute`` sums them.

        ends_unit: of the recomputed unit that ends with this layer; its recomputation sends nothing, since only the
        unit's output needs the result.
        """

    @property
    def is_local(self) -> bool:
        """True if all experts are on this rank, each of them whole."""
        return self.ep.size == self.emp.size == 1

    @property
    def weighs_inside(self) -> bool:
        """True if the experts multiply their activations by the gate weights; otherwise their summed outputs are.

        The former are fewer numbers, but give the weights' whole gradient only where experts are whole.
        """
        return self.emp.size == 1

    @property
    def exchanges_counts(self) -> bool:
        """True if ranks must exchange the numbers of rows before the rows."""
        return not self.even_splits and (self.ep.size > 1 or self.gathers)

    @property
    def gathers(self) -> bool:
        """True if each rank of emp receives different rows, which all of its ranks need."""
        return self.sequence_sharded and self.emp.size > 1


def unsent_if_unused(back: RowExchange, ends_unit: Replay | None) -> RowExchange | Unsent:
    """Return the exchange of a combine; in the recomputation of the unit that ends with its layer, an unsent one.

    The backward may need the rows sent, for the weights, but not those received.
    """
    return Unsent(back) if ends_unit is not None and ends_unit.recomputing else back
