"""Rows of parameters that move between the ranks of an axis which splits them, with all that belongs to them.

    slots, two on each rank    a b | c d      an expert moves as a whole: a row of each tensor in ``tensors``, which is
    afterwards                 c b | a d      split along dim 0, in one all-to-all

Sharding may cut a rank's piece further. If it cuts dim 0, a row must go to the same shard's piece on another rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device


@dataclass(frozen=True)
class RowMoves:
    """Moves between the slots of a rank's piece and those of others.

    Attributes:
        leaving: Slots of the piece, from its first one, in the order of their rows' destinations.
        arriving: Slots of the piece, in the order of their rows' sources, and of destinations from one source.
        send: Rows to each rank.
        receive: Rows from each rank.
    """

    leaving: tuple[int, ...]
    arriving: tuple[int, ...]
    send: tuple[int, ...]
    receive: tuple[int, ...]

    @classmethod
    def between(cls, before: Sequence[int], after: Sequence[int], piece: range, ranks: int) -> RowMoves:
        """Return the moves of one rank on an axis of ``ranks`` ranks.

        Args:
            before: The expert (or other owner of rows) in each slot.
            after: The same experts, in the order of their slots afterwards.
            piece: Slots of this rank's piece.
        """
        local = len(before) // ranks
        source, target = ({expert: slot for slot, expert in enumerate(experts)} for experts in (before, after))
        changed = [slot for slot in piece if before[slot] != after[slot]]
        leaving = sorted((target[before[slot]], slot) for slot in changed)
        arriving = sorted((source[after[slot]] // local, slot) for slot in changed)
        send, receive = [0] * ranks, [0] * ranks
        for to, _ in leaving:
            send[to // local] += 1
        for rank, _ in arriving:
            receive[rank] += 1
        first = piece.start
        return cls(
            tuple(slot - first for _, slot in leaving),
            tuple(slot - first for _, slot in arriving),
            tuple(send),
            tuple(receive),
        )


@torch.no_grad()
def move_rows(tensors: Sequence[Tensor], moves: RowMoves, axis: Axis, device: Device) -> None:
    """Move rows [slots of the piece, ..] of all tensors over an axis of several ranks, in place.

    The tensors are this rank's pieces, of one dtype. Collective: ranks without moves take part.
    """
    leaving, arriving = device.integers((moves.leaving, moves.arriving)).unbind(0)  # as many of each
    sent = torch.cat([tensor.index_select(0, leaving).flatten(1) for tensor in tensors], dim=1)
    received = sent.new_empty(len(moves.arriving), sent.shape[1])
    with axis.waiting("all_to_all"):
        collectives.all_to_all(received, sent, axis, moves.receive, moves.send)
    widths = [math.prod(tensor.shape[1:]) for tensor in tensors]  # also of an empty piece
    for tensor, rows in zip(tensors, received.split(widths, dim=1), strict=True):
        tensor.index_copy_(0, arriving, rows.reshape(-1, *tensor.shape[1:]))
