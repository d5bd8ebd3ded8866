"""Rows of a dispatch: their number and their width.

A row is a (token, choice) pair. Plans and runs share these formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapar.moe.sizes import MoeSizes

ALIGNED_BYTES = 16  # NCCL copies whole vectors of aligned rows


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one layer and one micro-batch on one rank.

    Attributes:
        sent: Rows of this rank's tokens.
        multiplied: Rows that this rank's experts multiply if the load is balanced.
        most: Rows that they multiply in the worst case: all tokens of all ep ranks choose experts of this rank.
    """

    sent: int
    multiplied: int
    most: int

    @classmethod
    def of(cls, moe: MoeSizes, positions: int, ep: int, gathered: int, *, even: bool) -> ExpertRows:
        """Return the rows of a rank with ``positions`` positions of a micro-batch.

        Args:
            moe: Sizes of the layer.
            positions: Positions on this rank.
            ep: Expert parallel degree.
            gathered: Number of emp ranks that gather each other's rows; 1 if each rank has all rows.
            even: Messages have even splits, padded to the capacity.
        """
        sent = dispatched_rows(moe, positions, positions, even=even)
        local_experts = moe.num_experts // ep
        return cls(sent, sent * gathered, positions * gathered * ep * min(moe.topk, local_experts))


def dispatched_rows(moe: MoeSizes, positions: int, tokens: int, *, even: bool) -> int:
    """Return the rows of ``positions`` positions: all pairs without a capacity, else at most the capacity.

    Args:
        moe: Sizes of the layer.
        positions: Positions on this rank.
        tokens: Tokens that share a capacity.
        even: Messages have even splits, padded to the capacity.
    """
    if even:
        return moe.num_experts * moe.capacity(tokens)
    pairs = positions * moe.topk
    return min(pairs, moe.num_experts * moe.capacity(tokens)) if moe.has_capacity else pairs


def row_columns(hidden: int, weight_bytes: int, item_bytes: int) -> int:
    """Return the elements of a row: ``hidden`` elements, the bits of its weight, and padding to 16 bytes."""
    unit = max(1, ALIGNED_BYTES // item_bytes)
    wanted = hidden + weight_bytes // item_bytes
    return -(-wanted // unit) * unit
