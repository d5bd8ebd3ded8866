"""An objective, and what several of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.samples import Sample

if TYPE_CHECKING:
    import numpy as np


class Task(Protocol):
    """One objective."""

    @property
    def name(self) -> str:
        """Its name in ``model.ernie3.tasks``."""

    def make(self, number: int, draws: Draws) -> Sample:
        """Sample ``number`` of this task; depends on it and on ``draws`` only."""


class DocumentPieces(Protocol):
    """Token pieces that know which document they are from."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> np.ndarray: ...

    def document(self, number: int) -> int:
        """The document that piece ``number`` is from; equal numbers, equal documents."""


def cut_evenly(starts: np.ndarray, parts: int) -> list[slice]:
    """T ids in ``parts`` near-equal pieces, cut at the word start nearest to where an equal cut would be.

    starts: [T] bool. Every piece has at least one id; T must be at least ``parts``.
    """
    import numpy as np

    length, places = len(starts), np.flatnonzero(starts)
    edges = [0]
    for part in range(1, parts):
        wanted, low, high = length * part // parts, edges[-1] + 1, length - (parts - part)
        near = places[(places >= low) & (places <= high)]
        edges.append(int(near[np.abs(near - wanted).argmin()]) if len(near) else min(max(wanted, low), high))
    return [slice(a, b) for a, b in zip(edges, (*edges[1:], length), strict=True)]
