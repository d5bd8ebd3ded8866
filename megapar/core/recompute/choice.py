"""The choice of layers to recompute, and of their units, for runs and for plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

# Newest units of a rank whose inputs stay whole on the device (``core/recompute/saved_inputs.py``).
NEWEST_WHOLE = 2


class LayerSpan(NamedTuple):
    """Consecutive layers of this rank that run together, as one recomputed unit if ``recomputed``."""

    start: int
    stop: int
    recomputed: bool


class RecomputeChoice(Protocol):
    """A choice of the layers to recompute, and of their units."""

    def spans(self, num_layers: int) -> Sequence[LayerSpan]:
        """Return spans that cover all of this rank's layers, numbered from 0, in order."""


class Interval(NamedTuple):
    """Recompute all layers, in units of ``layers`` consecutive ones; the last unit may be shorter."""

    layers: int

    def spans(self, num_layers: int) -> list[LayerSpan]:
        starts = range(0, num_layers, self.layers)
        return [LayerSpan(start, min(start + self.layers, num_layers), True) for start in starts]


class FirstLayers(NamedTuple):
    """Recompute the first ``layers`` layers, each as its own unit; the other layers keep everything."""

    layers: int

    def spans(self, num_layers: int) -> list[LayerSpan]:
        return [LayerSpan(number, number + 1, number < self.layers) for number in range(num_layers)]


def recompute_choice(interval: int, method: str | None, layers: int | None) -> RecomputeChoice | None:
    """Return the choice that the recompute flags make; None: recompute nothing."""
    if method == "block":
        return FirstLayers(layers or 0)
    if method == "uniform" or interval:
        return Interval(interval or layers or 1)
    return None
