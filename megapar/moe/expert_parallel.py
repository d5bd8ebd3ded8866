"""Brings tokens to experts on other ranks: all-to-all over ep, and over emp what a cut expert needs.

    tokens [T, H] --pack--> message [R_out, H + w], sorted by expert, so by rank (w: ``message``)
        dispatch   all-to-all over ep           received [R_in, H + w]: from each rank, its rows by expert
        enter      tokens replicated over mp:   sort by expert, copy over emp (backward: all-reduce)
                   tokens cut over mp:          all-gather over emp, then sort by expert
        experts    each rank of emp has F/emp features of every expert here: partial sums
        leave      replicated:                  back in received order, all-reduce over emp
                   cut:                         back in gathered order, reduce-scatter over emp
                   times the gate weights, which came along: from here on the sums are whole
        combine    all-to-all over ep           each pair's row is back where it came from
    y [T, H] = the sum of each token's rows

Every step is a start/wait pair (``core.tickets``), here used back to back. Splits: uneven ones are what the kept pairs
need, and cost an exchange of counts and one wait of the host; even ones send every expert's capacity from every rank,
and cost padding instead.

Shape letters: T tokens, k choices per token, H hidden, E experts, L experts on this rank, R rows, C rows per expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.axis import Axis
from megapar.core.collectives import gather
from megapar.core.device.base import Event
from megapar.core.exchange import AllGather, AllToAll, Copy, Reduce, ReduceScatter, Unsent
from megapar.core.replay import Replay, once
from megapar.core.tickets import Ticket, start, wait
from megapar.core.traffic import Traffic
from megapar.moe.dispatch import (
    Dispatched,
    Permutation,
    Plan,
    permute,
    sort_by_expert,
    spread_by_expert,
    unpermute,
    weigh,
)
from megapar.moe.message import pack, unpack
from megapar.moe.stats import count_pairs

Flying = tuple[Tensor, Ticket]

READ = "ExpertParallelDispatcher.read"  # where the host waits for counts


class Announced(NamedTuple):
    """Who sends how many rows where, on its way to the host.

    counts: [ep, L] rows from this rank to each expert. arriving: [ep, L] rows from each rank to the experts here.
    gathered: [emp, ep, L] the same for every rank of emp; None where nothing is gathered over it.
    numbers: all of them on the host, flat, in this order, once ``ready`` has come.
    """

    counts: Tensor
    arriving: Tensor
    gathered: Tensor | None
    numbers: Tensor
    ready: Event


@dataclass(frozen=True)
class ExpertParallelDispatcher:
    """To experts on other ranks and back.

    ep: E / ep experts live on each rank. emp: the ranks that share each of these experts, cut over its features.
    cut: tokens are cut over emp, each rank dispatches its own; otherwise all ranks of emp dispatch the same ones.
    even: even splits; then all ranks of ep and emp must make the same room.
    """

    num_experts: int
    ep: Axis
    emp: Axis
    cut: bool
    even: bool
    traffic: Traffic

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
        """Send every kept pair's token and weight to its expert.

        kept_Tk: bool; None keeps every pair. rows: with even splits, num_experts times the rows per expert; where
        nothing is counted (one rank on ep, tokens not cut) as in ``LocalDispatcher``, and so is ``exact``.
        """
        plan = self.plan(experts_Tk, kept_Tk, rows, exact, replay)
        flying = self.start_dispatch(x_TH, weights_Tk, plan)
        received_RH, weights_R = self.wait_dispatch(flying, plan, x_TH.shape[1], weights_Tk.dtype)
        rows_RH = self.wait_enter(self.start_enter(received_RH), plan)
        assert plan.counts is not None
        return Dispatched(rows_RH, weights_R, plan.counts, plan.permutation, plan)

    def combine(self, rows_RH: Tensor, sent: Dispatched, closing: Replay | None = None) -> Tensor:
        """[T, H]: the expert outputs times their weights, summed per token; rows_RH are partial sums over emp."""
        plan = sent.plan
        assert plan is not None
        out_RH = self.wait_leave(self.start_leave(rows_RH, plan), plan)
        return self.wait_combine(self.start_combine(weigh(out_RH, sent.weights), plan, closing), plan)

    def plan(
        self, experts_Tk: Tensor, kept_Tk: Tensor | None, rows: int, exact: bool, replay: Replay | None = None
    ) -> Plan:
        """How these pairs travel; for the arguments see ``dispatch``."""
        if not self.even and not self.counts:
            permutation, counts_E = sort_by_expert(experts_Tk, kept_Tk, self.num_experts, rows, exact=exact)
            return Plan(permutation, AllToAll(self.ep), rows, rows, None, counts_E)
        if self.even:
            return self._even_plan(experts_Tk, kept_Tk, rows)

        def count() -> tuple[Announced, Tensor]:
            told = self.announce(experts_Tk, kept_Tk)
            return told, self.read(told)

        return self.uneven_plan(*once(replay, count), experts_Tk, kept_Tk)

    def announce(self, experts_Tk: Tensor, kept_Tk: Tensor | None, *, aside: bool = False) -> Announced:
        """Exchange the counts of rows; the host does not wait for the device. aside: on a stream of its own.

        First over emp, then over ep: there they queue behind the dispatch of the slice before, and what is launched
        over emp after that, such as the next slice's sums, would queue behind it as well.
        """
        counts = count_pairs(experts_Tk, kept_Tk, self.num_experts).sum(0).view(self.ep.size, -1)
        sharers = gather(counts[None], self.emp, 0) if self.gathers else counts[None]
        # [ep, emp, L]; a copy flies, since the counts are used again.
        arrived = sharers.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        if self.ep.size > 1:
            flight = self.traffic.launch(AllToAll(self.ep, kind="counts"), arrived)
            arrived = self.traffic.land(flight, metered=not aside)
        gathered = arrived.transpose(0, 1).contiguous() if self.gathers else None
        arriving = arrived[:, 0] if gathered is None else gathered[self.emp.rank]
        parts = [counts, arriving] if gathered is None else [counts, arriving, gathered]
        numbers, ready = self.traffic.device.host_copy(torch.cat([part.flatten() for part in parts]))
        return Announced(counts, arriving, gathered, numbers, ready)

    def uneven_plan(self, told: Announced, numbers: Tensor, experts_Tk: Tensor, kept_Tk: Tensor | None) -> Plan:
        """Splits from the counts; numbers: those on the host, as ``read`` gives them."""
        send, receive = numbers[0].sum(1).tolist(), numbers[1].sum(1).tolist()
        totals = numbers[2:].sum((1, 2)).tolist()
        permutation, _ = sort_by_expert(experts_Tk, kept_Tk, self.num_experts, sum(send), exact=True)
        exchange = AllToAll(self.ep, tuple(send), tuple(receive))
        room = max(totals, default=sum(receive))
        counts = told.arriving[None] if told.gathered is None else told.gathered
        order, counts_L = order_by_expert(counts, room, sum(totals or receive))
        arriving = numbers[2:].sum((0, 1)) if totals else numbers[1].sum(0)
        return Plan(permutation, exchange, sum(receive), room, order, counts_L, sizes=tuple(arriving.tolist()))

    def read(self, told: Announced) -> Tensor:
        """[2 (+ emp), ep, L] on the host: counts, arriving (and gathered). The one wait of the host."""
        told.ready.synchronize()
        self.traffic.count_host_wait(READ)
        return told.numbers.view(-1, *told.counts.shape)

    def piece(self, counts: Tensor, number: int, pieces: int) -> Tensor:
        """Rows of each count that are in piece ``number`` of ``pieces``: ceil(count / pieces), the last ones fewer."""
        share = -torch.div(-counts, pieces, rounding_mode="floor")
        return (counts - number * share).clamp(min=0).minimum(share)

    def start_dispatch(self, x_TH: Tensor, weights_Tk: Tensor, plan: Plan) -> Flying:
        """Send tokens and weights to the ranks of their experts."""
        return start(plan.exchange, pack(x_TH, weights_Tk, plan.permutation), self.traffic)

    def wait_dispatch(
        self, flying: Flying, plan: Plan, hidden: int, weight_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(tokens, weights [R_in]): tokens sorted by expert, or as received where they are still to be gathered."""
        if self.gathers:
            return unpack(wait(*flying), hidden, weight_dtype, None, plan.room)
        return unpack(wait(*flying), hidden, weight_dtype, plan.order, plan.received)

    def start_enter(self, rows_RH: Tensor) -> Flying:
        """Give the rows to all ranks that share the experts."""
        return start(AllGather(self.emp) if self.gathers else Copy(self.emp), rows_RH, self.traffic)

    def wait_enter(self, flying: Flying, plan: Plan) -> Tensor:
        """[R, H] sorted by expert."""
        rows_RH = wait(*flying)
        return permute(rows_RH, plan.order) if self.gathers and plan.order is not None else rows_RH

    def start_leave(self, rows_RH: Tensor, plan: Plan) -> Flying:
        """Sum the experts' outputs [R, H] over the ranks that share them."""
        if plan.order is not None:
            rows_RH = unpermute(rows_RH, plan.order)
        return start(ReduceScatter(self.emp) if self.gathers else Reduce(self.emp), rows_RH, self.traffic)

    def wait_leave(self, flying: Flying, plan: Plan) -> Tensor:
        """[R_in, H] in the order in which they were received."""
        return wait(*flying)[: plan.received]

    def start_combine(self, rows_RH: Tensor, plan: Plan, closing: Replay | None) -> Flying:
        """Send the weighted outputs [R_in, H] back to the ranks of their tokens; for ``closing`` see ``Dispatcher``."""
        back = plan.exchange.conjugate()
        # Backward needs what is sent, for the weights, but not what arrives.
        unused = closing is not None and closing.again
        return start(Unsent(back) if unused else back, rows_RH, self.traffic)

    def wait_combine(self, flying: Flying, plan: Plan) -> Tensor:
        """[T, H]: the sum of each token's rows."""
        return unpermute(wait(*flying), plan.permutation)

    @property
    def counts(self) -> bool:
        """Ranks have to tell each other how many rows they send."""
        return not self.even and (self.ep.size > 1 or self.gathers)

    @property
    def gathers(self) -> bool:
        """Each rank of emp receives rows of its own, which the others need."""
        return self.cut and self.emp.size > 1

    def _even_plan(self, experts_Tk: Tensor, kept_Tk: Tensor | None, rows: int) -> Plan:
        capacity = rows // self.num_experts
        permutation = spread_by_expert(experts_Tk, kept_Tk, self.num_experts, capacity)
        sharers = self.emp.size if self.gathers else 1
        shape = (sharers, self.ep.size, self.num_experts // self.ep.size)
        counts = torch.full(shape, capacity, dtype=torch.int64, device=experts_Tk.device)
        order, counts_L = order_by_expert(counts, rows, sharers * rows)
        sizes = (sharers * self.ep.size * capacity,) * shape[2]
        return Plan(permutation, AllToAll(self.ep), rows, rows, order, counts_L, sizes=sizes)


def order_by_expert(counts_NSL: Tensor, room: int, rows: int) -> tuple[Permutation, Tensor]:
    """The permutation that sorts gathered rows by expert, and the rows of each expert [L].

    counts_NSL: int64, rows in block n from source s for expert l, where they lie in this order; each block is filled
    up with padding to ``room`` rows. rows: the sum of the counts, known on the host. Rows of one expert stay in their
    order, padding has no place in the result.
    """
    num_experts = counts_NSL.shape[2]
    counts_NQ = counts_NSL.flatten(1)
    filled_NQ = F.pad(counts_NQ, (0, 1))
    filled_NQ[:, -1] = room - counts_NQ.sum(1)
    expert_Q = torch.arange(counts_NQ.shape[1] + 1, device=counts_NSL.device) % num_experts
    expert_Q[-1:].fill_(num_experts)  # a number written into a 0-dim view would wait for the device
    total = room * counts_NSL.shape[0]
    key_P = torch.repeat_interleave(expert_Q.repeat(counts_NSL.shape[0]), filled_NQ.flatten(), output_size=total)
    pair = torch.sort(key_P, stable=True).indices
    row = torch.empty_like(pair).scatter_(0, pair, torch.arange(total, device=pair.device))
    real = None if rows == total else (key_P < num_experts)[:, None]
    order = Permutation(pair[:rows], row.clamp(max=max(rows - 1, 0))[:, None], real, None)
    return order, counts_NSL.sum((0, 1))
