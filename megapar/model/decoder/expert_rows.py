"""Rows of a dispatch: how many a rank sends and its experts multiply, and how wide one is. Standard library only.

A row is a (token, choice) pair. Plans and runs compute both here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapar.model.decoder.sizes import MoeSizes

ALIGNED_BYTES = 16  # from which NCCL copies whole vectors


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one layer and one micro-batch on one rank.

    Attributes:
        sent: Rows that the tokens of this rank make.
        multiplied: Rows that this rank's experts multiply where the load is even.
        most: Rows that they multiply where all tokens of all ep ranks choose experts of this rank.
    """

    sent: int
    multiplied: int
    most: int

    @classmethod
    def of(cls, moe: MoeSizes, positions: int, ep: int, gathered: int, *, even: bool) -> ExpertRows:
        """The rows of a rank that has ``positions`` of a micro-batch.

        gathered: Ranks that share the width of an expert and gather one another's rows; 1 where each has all of them.
        """
        sent = dispatched_rows(moe, positions, positions, even=even)
        here = moe.num_experts // ep
        return cls(sent, sent * gathered, positions * gathered * ep * min(moe.topk, here))


def dispatched_rows(moe: MoeSizes, positions: int, tokens: int, *, even: bool) -> int:
    """Rows that ``positions`` make: all pairs where nothing is dropped, else what the capacity lets through.

    tokens: Those that share a capacity. even: Messages have even splits, padded to the capacity.
    """
    if even:
        return moe.num_experts * moe.capacity(tokens)
    pairs = positions * moe.topk
    return min(pairs, moe.num_experts * moe.capacity(tokens)) if moe.has_capacity else pairs


def row_columns(hidden: int, weight_bytes: int, item_bytes: int) -> int:
    """Elements of a token of ``hidden`` elements, the bits of its weight, and what fills up to 16 bytes."""
    unit = max(1, ALIGNED_BYTES // item_bytes)
    wanted = hidden + weight_bytes // item_bytes
    return -(-wanted // unit) * unit
