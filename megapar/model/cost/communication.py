"""Communication of a layer's operators over mp, emp and cp. Standard library only.

Tested in ``tests/model/cost/test_model_cost.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megapar.model.cost.model_cost import CommCost
from megapar.model.cost.rank_view import RankView

# A split sequence is gathered for a matrix product, and again for the weight gradient.
_GATHERED = (("all_gather", "forward"), ("all_gather", "backward"))
# Bytes that a rank sends in a ring collective, in units of (n - 1) / n of the whole.
_FACTORS = {"all_reduce": 2.0, "all_to_all": 1.0}


def ring_bytes(kind: str, whole: float, ranks: int) -> float:
    """Return the bytes that one rank sends in a collective over ``whole`` bytes."""
    return whole * (_FACTORS.get(kind, 1.0) * (ranks - 1) / ranks)


class Communication:
    """Communication of one micro-batch's operators on a rank."""

    def __init__(self, view: RankView) -> None:
        self._view = view

    def over_mp(self, kind: str, whole: float, phase: str, *, hidden: bool = False) -> CommCost:
        """Return the cost of a collective over mp."""
        return CommCost("mp", kind, ring_bytes(kind, whole, self._view.mp), phase, hidden)

    def over_emp(self, kind: str, whole: float, phase: str) -> CommCost:
        """Return the cost of a collective over emp, the ranks that split the width of an expert."""
        return CommCost("emp", kind, ring_bytes(kind, whole, self._view.emp), phase)

    def context(self, queries: float, keys: float, groups: float) -> tuple[CommCost, ...]:
        """Return the communication of attention over cp.

        Args:
            queries: Elements of the queries on this rank.
            keys: Elements of the keys on this rank.
            groups: Key-value heads on this rank.
        """
        view = self._view
        cp, e, w = view.cp, view.item_bytes, view.wide_bytes
        if cp == 1:
            return ()
        if view.ulysses:
            copies = cp // math.gcd(cp, round(groups))
            heads = e * (2 * queries + 2 * keys * copies)
            return tuple(self._over_cp("all_to_all", heads, phase) for phase in ("forward", "backward"))
        both, others = 2 * keys, cp - 1
        again = view.ampipe_degree <= 1  # with slices the keys are kept, so the backward does not exchange them again
        if view.ring:
            sent = ((e, "forward"), *([(e, "backward")] if again else []), (w, "backward"))
            return tuple(CommCost("cp", "send", others * both * size, phase, True) for size, phase in sent)
        keys_again = [self._over_cp("all_gather", cp * both * e, "backward", hidden=True)] if again else []
        return (
            self._over_cp("all_gather", cp * both * e, "forward", hidden=True),
            *keys_again,
            self._over_cp("reduce_scatter", cp * both * w, "backward", hidden=True),
        )

    def column_parallel(self, whole: float) -> tuple[CommCost, ...]:
        """Return the communication of a column parallel layer. whole: Bytes of its input [t, H]."""
        return self._linear(whole, "backward", (*_GATHERED, ("reduce_scatter", "backward")), hidden=True)

    def row_parallel(self, whole: float, *, hidden: bool = True) -> tuple[CommCost, ...]:
        """Return the communication of a row parallel layer. whole: Bytes of its output [t, H]."""
        return self._linear(whole, "forward", (("reduce_scatter", "forward"), _GATHERED[1]), hidden=hidden)

    def replicated(self, whole: float, phase: str) -> tuple[CommCost, ...]:
        """Return the all-reduce of the gradient of an input that is replicated over mp."""
        return (self.over_mp("all_reduce", whole, phase),) if self._view.mp > 1 else ()

    def _over_cp(self, kind: str, whole: float, phase: str, *, hidden: bool = False) -> CommCost:
        return CommCost("cp", kind, ring_bytes(kind, whole, self._view.cp), phase, hidden)

    def _linear(
        self, whole: float, summed: str, split: Sequence[tuple[str, str]], *, hidden: bool
    ) -> tuple[CommCost, ...]:
        """Return the collectives of a linear layer over mp.

        Args:
            whole: Bytes of the tensor.
            summed: Phase of the all-reduce if each rank has all positions.
            split: The collectives, (kind, phase) each, if the positions are split.
            hidden: The collectives overlap a matrix product.
        """
        if self._view.mp == 1:
            return ()
        kinds = split if self._view.splits_sequence else (("all_reduce", summed),)
        return tuple(self.over_mp(kind, whole, phase, hidden=hidden) for kind, phase in kinds)
