"""Pipe-experts: a dispatch divided by local expert, and each expert's kept rows into pieces sent one at a time.

    message   expert 0: piece 0 | piece 1 | expert 1: piece 0 | piece 1     each: rows for rank 0, rank 1, ..

Each piece is a separate all-to-all, so that the collectives of one piece are hidden under the computation of another.
Only kept rows are divided, not padding: of m rows that a rank has for an expert, a piece contains ceil(m / N), and the
last pieces may be empty. Both ends have m from the single exchange of counts.

Shape letters: T tokens, k choices per token, L experts on this rank, N pieces per expert, R rows.
Tested in ``tests/moe/test_passage.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megapar.core.comm.exchange import AllToAll
from megapar.moe.dispatcher import DispatchPlan
from megapar.moe.expert_order import ExpertOrder, kept_rows, order_by_expert

if TYPE_CHECKING:
    from megapar.moe.token_dispatcher import RowCounts, TokenDispatcher


def piece_plans(
    dispatcher: TokenDispatcher, row_counts: RowCounts, pairs: ExpertOrder, pieces: int
) -> tuple[ExpertOrder, tuple[DispatchPlan, ...]]:
    """Return (order of the whole message, its L · pieces plans in the order in which they are sent).

    Args:
        dispatcher: Plans the messages.
        row_counts: Its counts of rows.
        pairs: All pairs sorted by expert, by the dispatcher.
        pieces: N.
    """
    numbers = dispatcher.read(row_counts)
    parts = [dispatcher.piece(numbers, n, pieces) for n in range(pieces)]  # each [2 (+ emp), ep, L]
    own = [dispatcher.piece(row_counts.counts, n, pieces) for n in range(pieces)]
    order = _reorder(kept_rows(pairs, int(numbers[0].sum())), row_counts.counts, own)
    gathered: list[Tensor | None] = [None] * pieces
    if row_counts.gathered is not None:
        gathered = [dispatcher.piece(row_counts.gathered, n, pieces) for n in range(pieces)]
    plans = [
        _plan(dispatcher, order, part, of_all, expert)
        for expert in range(numbers.shape[2])
        for part, of_all in zip(parts, gathered, strict=True)
    ]
    return order, tuple(plans)


def _reorder(order: ExpertOrder, counts: Tensor, parts: list[Tensor]) -> ExpertOrder:
    """Reorder rows sorted by (rank, expert) to rows sorted by (expert, piece, rank).

    counts, parts: [ep, L], on the device, so that the host's copies need not be sent back.
    """
    rows = order.pair.shape[0]
    if not rows:
        return order
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    lengths = torch.stack(parts).permute(2, 0, 1)  # [L, N, ep]
    begins = torch.stack([starts + sum(parts[:n]) for n in range(len(parts))]).permute(2, 0, 1)
    lengths, begins = lengths.flatten(), begins.flatten()
    shift = begins - (lengths.cumsum(0) - lengths)
    old = torch.arange(rows, device=shift.device) + torch.repeat_interleave(shift, lengths, output_size=rows)
    new = torch.empty_like(old).scatter_(0, old, torch.arange(rows, device=old.device))
    return order._replace(pair=order.pair[old], row=new[order.row])


def _plan(
    dispatcher: TokenDispatcher, order: ExpertOrder, part: Tensor, gathered: Tensor | None, expert: int
) -> DispatchPlan:
    """Plan one piece: rows of one expert from every rank.

    part: the piece's counts [2 (+ emp), ep, L] on the host. gathered: its counts [emp, ep, L] on the device.
    """
    send, receive = (tuple(part[way, :, expert].tolist()) for way in (0, 1))
    received = sum(receive)
    room, receive_order = received, None
    if gathered is not None:
        known = part[2:, :, expert]
        room = int(known.sum(1).max())
        receive_order = order_by_expert(gathered[:, :, expert].unsqueeze(2), room, int(known.sum())).order
    return DispatchPlan(
        send_order=order,
        exchange=AllToAll(dispatcher.ep, send, receive),
        received=received,
        room=room,
        receive_order=receive_order,
        counts=None,
        expert=expert,
    )
