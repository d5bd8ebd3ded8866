"""The protocol of an objective, and functions that several objectives share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.samples import Sample

if TYPE_CHECKING:
    import numpy as np


class Task(Protocol):
    """One pre-training objective."""

    @property
    def name(self) -> str:
        """Name of the task in ``model.ernie3.tasks``."""

    def make(self, number: int, draws: Draws) -> Sample:
        """Return sample ``number`` of this task; it depends only on the number and on ``draws``."""


def cut_evenly(starts: np.ndarray, parts: int) -> list[slice]:
    """Cut T ids into ``parts`` pieces of nearly equal length, each at the word start nearest to the equal cut.

    ``starts`` [T] bool is True at the first id of each word. Every piece has at least one id, so T must be at least
    ``parts``.
    """
    import numpy as np

    length, places = len(starts), np.flatnonzero(starts)
    edges = [0]
    for part in range(1, parts):
        wanted, low, high = length * part // parts, edges[-1] + 1, length - (parts - part)
        near = places[(places >= low) & (places <= high)]
        edges.append(int(near[np.abs(near - wanted).argmin()]) if len(near) else min(max(wanted, low), high))
    return [slice(a, b) for a, b in zip(edges, (*edges[1:], length), strict=True)]
