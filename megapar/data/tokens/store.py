"""Token stores: documents as ids in memory-mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Offsets(Protocol):
    """An array [D + 1] that is read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice) -> np.ndarray: ...


class Tokens(Protocol):
    """An array [N] of ids that is read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice) -> np.ndarray: ...


@dataclass(frozen=True)
class TokenStore:
    """The training or the held-out documents of one source, as ids, each followed by the end token.

    tokens: [N] of some integer dtype, memory-mapped; the documents one after the other.
    offsets: [D + 1] int64, memory-mapped; document d is tokens[offsets[d] : offsets[d + 1]].
    notes: messages about it for the log.
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
    """Stores that are trained on, or held out, together.

    stores: in the order of their sources. weights: of the stores; None where they are one corpus.
    """

    stores: Sequence[TokenStore]
    weights: tuple[Fraction, ...] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the stores, each once."""
        return tuple(dict.fromkeys(note for store in self.stores for note in store.notes))
