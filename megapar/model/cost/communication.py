"""The communication of the operators of a layer inside their groups. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megapar.model.cost.model_cost import CommCost
from megapar.model.cost.rank_view import RankView

# A sequence that is split over ranks, gathered for a matrix product and again for the product of its gradient.
_GATHERED = (("all_gather", "forward"), ("all_gather", "backward"))
# What a rank sends of a ring collective over the whole bytes, in units of (n - 1) / n of them.
_FACTORS = {"all_reduce": 2.0, "all_to_all": 1.0}


def ring_bytes(kind: str, whole: float, ranks: int) -> float:
    """Bytes that one rank sends of a collective over ``whole`` bytes."""
    return whole * (_FACTORS.get(kind, 1.0) * (ranks - 1) / ranks)


class Communication:
    """The communication of one micro-batch's operators on a rank."""

    def __init__(self, view: RankView) -> None:
        self._view = view

    def over_mp(self, kind: str, whole: float, phase: str, *, hidden: bool = False) -> CommCost:
        """A collective over mp."""
        return CommCost("mp", kind, ring_bytes(kind, whole, self._view.mp), phase, hidden)

    def over_emp(self, kind: str, whole: float, phase: str) -> CommCost:
        """A collective between the ranks that share the width of an expert."""
        return CommCost("emp", kind, ring_bytes(kind, whole, self._view.emp), phase)

    def context(self, queries: float, keys: float, groups: float) -> tuple[CommCost, ...]:
        """The communication of attention whose sequences cp ranks share.

        queries, keys: Elements of them on this rank. groups: Key-value heads on this rank.
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
        again = view.ampipe_degree <= 1  # with slices keys are kept, and do not come again
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
        """The communication of a column parallel layer. whole: Bytes of its input [t, H]."""
        return self._linear(whole, "backward", (*_GATHERED, ("reduce_scatter", "backward")), hidden=True)

    def row_parallel(self, whole: float, *, hidden: bool = True) -> tuple[CommCost, ...]:
        """The communication of a row parallel layer. whole: Bytes of its output [t, H]."""
        return self._linear(whole, "forward", (("reduce_scatter", "forward"), _GATHERED[1]), hidden=hidden)

    def replicated(self, whole: float, phase: str) -> tuple[CommCost, ...]:
        """The sum of the gradient of an input that all mp ranks hold alike."""
        return (self.over_mp("all_reduce", whole, phase),) if self._view.mp > 1 else ()

    def _over_cp(self, kind: str, whole: float, phase: str, *, hidden: bool = False) -> CommCost:
        return CommCost("cp", kind, ring_bytes(kind, whole, self._view.cp), phase, hidden)

    def _linear(
        self, whole: float, summed: str, split: Sequence[tuple[str, str]], *, hidden: bool
    ) -> tuple[CommCost, ...]:
        """Over mp: a sum in the phase ``summed`` where each rank has all positions; where they are split, the
        collectives in ``split``, (kind, phase) each."""
        if self._view.mp == 1:
            return ()
        kinds = split if self._view.splits_sequence else (("all_reduce", summed),)
        return tuple(self.over_mp(kind, whole, phase, hidden=hidden) for kind, phase in kinds)
