"""Which layers are recomputed, and in which units; runs and plans decide it here. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class LayerSpan(NamedTuple):
    """Consecutive layers [start, stop) of this rank that run together; recomputed: as one unit."""

    start: int
    stop: int
    recomputed: bool


class RecomputeChoice(Protocol):
    """Which layers are recomputed, and in which units."""

    def spans(self, num_layers: int) -> Sequence[LayerSpan]:
        """All of this rank's layers, counted from 0, in order."""
        ...


class Interval(NamedTuple):
    """``layers`` consecutive layers at a time are a unit; the last one may be shorter."""

    layers: int

    def spans(self, num_layers: int) -> list[LayerSpan]:
        """See ``RecomputeChoice``."""
        starts = range(0, num_layers, self.layers)
        return [LayerSpan(start, min(start + self.layers, num_layers), True) for start in starts]


class FirstLayers(NamedTuple):
    """The first ``layers`` layers are a unit each, the others keep everything."""

    layers: int

    def spans(self, num_layers: int) -> list[LayerSpan]:
        """See ``RecomputeChoice``."""
        return [LayerSpan(number, number + 1, number < self.layers) for number in range(num_layers)]


def recompute_choice(interval: int, method: str | None, layers: int | None) -> RecomputeChoice | None:
    """The choice of ``--recompute-interval``, ``--recompute-method`` and ``--recompute-num-layers``; None: nothing."""
    if method == "block":
        return FirstLayers(layers or 0)
    if method == "uniform" or interval:
        return Interval(interval or layers or 1)
    return None
