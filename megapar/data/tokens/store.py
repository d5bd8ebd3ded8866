"""Token stores: documents as ids in memory-mapped files.

Tested in ``tests/data/sampling/test_samples.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Offsets(Protocol):
    """An array [D + 1] of offsets that is read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice) -> np.ndarray: ...


class Tokens(Protocol):
    """An array [N] of ids that is read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice) -> np.ndarray: ...


@dataclass(frozen=True)
class TokenStore:
    """The training or the held-out documents of one source, as ids, each followed by the end token.

    Attributes:
        tokens: [N] of an integer dtype, memory-mapped; the concatenated documents.
        offsets: [D + 1] int64, memory-mapped; document d is tokens[offsets[d] : offsets[d + 1]].
        notes: Messages about the source for the log.
    """

    tokens: Tokens
    offsets: Offsets
    notes: tuple[str, ...] = ()

    @property
    def documents(self) -> int:
        """Number of documents, D."""
        return len(self.offsets) - 1


@dataclass(frozen=True)
class StoreBlend:
    """The stores of all training sources, or of all held-out sources.

    Attributes:
        stores: The stores, in the order of their sources.
        weights: Weight of each store; None if they are one corpus.
    """

    stores: Sequence[TokenStore]
    weights: tuple[Fraction, ...] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the stores, each once."""
        return tuple(dict.fromkeys(note for store in self.stores for note in store.notes))
