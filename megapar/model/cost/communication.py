"""Communication of a layer's operators over mp, emp and cp."""

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

    def shared_sums(self, local_bytes: float) -> list[CommCost]:
        """Return the all-gathers of numbers over the ranks that share a sequence, mp first. own: Bytes of one rank."""
        view, sent = self._view, []
        if view.splits_sequence:
            local_bytes *= view.mp
            sent.append(self.over_mp("all_gather", local_bytes, "forward"))
        if view.cp > 1:
            sent.append(self._over_cp("all_gather", local_bytes * view.cp, "forward"))
        return sent

    def context(self, queries: float, columns: float, groups: float) -> tuple[CommCost, ...]:
        """Return the communication of attention over cp.

        Args:
            queries: Elements of the queries and of the output on this rank.
            columns: Elements of the keys and values on this rank, or of the latents that they are made of.
            groups: Key-value heads on this rank.
        """
        view = self._view
        cp, e, w = view.cp, view.item_bytes, view.wide_bytes
        if cp == 1:
            return ()
        if view.ulysses:
            copies = cp // math.gcd(cp, round(groups))
            heads = e * (queries + columns * copies)
            return tuple(self._over_cp("all_to_all", heads, phase) for phase in ("forward", "backward"))
        others = cp - 1
        again = view.ampipe_degree <= 1  # with slices the keys are kept, so the backward does not exchange them again
        if view.ring:
            sent = ((e, "forward"), *([(e, "backward")] if again else []), (w, "backward"))
            return tuple(CommCost("cp", "send", others * columns * size, phase, True) for size, phase in sent)
        keys_again = [self._over_cp("all_gather", cp * columns * e, "backward", hidden=True)] if again else []
        return (
            self._over_cp("all_gather", cp * columns * e, "forward", hidden=True),
            *keys_again,
            self._over_cp("reduce_scatter", cp * columns * w, "backward", hidden=True),
        )

    def context_in_window(self, features: float) -> tuple[CommCost, ...]:
        """Return the communication over cp of attention in a window, which needs the keys before a rank's rows only.

        features: Elements of a key and its value on this rank.
        """
        view = self._view
        sent = view.item_bytes * view.samples * view.window_rows * features
        return tuple(CommCost("cp", "all_to_all", sent, phase) for phase in ("forward", "backward"))

    def context_by_heads(self, queries: float, latents: float) -> tuple[CommCost, ...]:
        """Return the communication over cp of attention by heads whose keys and values are made of latents.

        Args:
            queries: Elements of the queries and of the output on this rank, of which other ranks take heads.
            latents: Elements of the latents on this rank, which all ranks take.
        """
        view = self._view
        if view.cp == 1:
            return ()
        whole = view.cp * latents
        return (
            *(self._over_cp("all_to_all", view.item_bytes * queries, phase) for phase in ("forward", "backward")),
            self._over_cp("all_gather", whole * view.item_bytes, "forward"),
            self._over_cp("reduce_scatter", whole * view.wide_bytes, "backward"),
        )

    def shared_input(self, whole: float, summed: float) -> tuple[CommCost, ...]:
        """Return the communication over mp of an input that column parallel products share and keep whole.

        Args:
            whole: Bytes of the input.
            summed: Bytes of its gradient, in the dtype of the sum, under which weight gradients are computed.
        """
        if self._view.mp == 1:
            return ()
        if not self._view.splits_sequence:
            return (self.over_mp("all_reduce", summed, "backward", hidden=True),)
        return (
            self.over_mp("all_gather", whole, "forward"),
            self.over_mp("reduce_scatter", summed, "backward", hidden=True),
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
