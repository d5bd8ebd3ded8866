"""Pipe-experts: a dispatch cut by local expert, and each expert's kept rows into pieces that travel one by one.

    message   expert 0: piece 0 | piece 1 | expert 1: piece 0 | piece 1     each: rows for rank 0, rank 1, ..

Each piece is an all-to-all of its own, so that one piece's collectives fly under another's computation. Rows are cut,
not padding: of m rows that a rank has for an expert, a piece gets ceil(m / N), the last ones perhaps none. Both ends
know m from the one exchange of counts.

Shape letters: T tokens, k choices per token, L experts on this rank, N pieces per expert, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.exchange import AllToAll
from megapar.moe.dispatch import Permutation, Plan, sort_by_expert
from megapar.moe.expert_parallel import Announced, ExpertParallelDispatcher, order_by_expert


def cut_plan(
    dispatcher: ExpertParallelDispatcher, told: Announced, experts_Tk: Tensor, kept_Tk: Tensor | None, pieces: int
) -> tuple[Permutation, tuple[Plan, ...]]:
    """(pairs to rows of the whole message, L · pieces plans in the order in which they travel)."""
    numbers = dispatcher.read(told)
    parts = [dispatcher.piece(numbers, n, pieces) for n in range(pieces)]  # each [2 (+ emp), ep, L]
    permutation, _ = sort_by_expert(experts_Tk, kept_Tk, dispatcher.num_experts, int(numbers[0].sum()), exact=True)
    permutation = _reorder(permutation, told.counts, [dispatcher.piece(told.counts, n, pieces) for n in range(pieces)])
    gathered = [None if told.gathered is None else dispatcher.piece(told.gathered, n, pieces) for n in range(pieces)]
    experts = numbers.shape[2]
    plans = [
        _plan(dispatcher, permutation, part, own, expert)
        for expert in range(experts)
        for part, own in zip(parts, gathered, strict=True)
    ]
    return permutation, tuple(plans)


def _reorder(permutation: Permutation, counts: Tensor, parts: list[Tensor]) -> Permutation:
    """Rows sorted by (rank, expert) to rows sorted by (expert, piece, rank).

    counts, parts: [ep, L] on the device, where they are known as well: what the host knows would have to go back.
    """
    rows = permutation.pair.shape[0]
    if not rows:
        return permutation
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    lengths = torch.stack(parts).permute(2, 0, 1)  # [L, N, ep]
    begins = torch.stack([starts + sum(parts[:n]) for n in range(len(parts))]).permute(2, 0, 1)
    lengths, begins = lengths.flatten(), begins.flatten()
    shift = begins - (lengths.cumsum(0) - lengths)
    old = torch.arange(rows, device=shift.device) + torch.repeat_interleave(shift, lengths, output_size=rows)
    new = torch.empty_like(old).scatter_(0, old, torch.arange(rows, device=old.device))
    return permutation._replace(pair=permutation.pair[old], row=new[permutation.row])


def _plan(
    dispatcher: ExpertParallelDispatcher, permutation: Permutation, part: Tensor, gathered: Tensor | None, expert: int
) -> Plan:
    """One piece: rows of one expert from every rank.

    part: [2 (+ emp), ep, L] on the host. gathered: [emp, ep, L] of it, on the device.
    """
    send, receive = (tuple(part[way, :, expert].tolist()) for way in (0, 1))
    received = sum(receive)
    room, order = received, None
    if gathered is not None:
        known = part[2:, :, expert]
        room = int(known.sum(1).max())
        order, _ = order_by_expert(gathered[:, :, expert].unsqueeze(2), room, int(known.sum()))
    return Plan(permutation, AllToAll(dispatcher.ep, send, receive), received, room, order, None, expert)
