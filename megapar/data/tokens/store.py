"""Token stores: documents as ids in memory-mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megapar.errors import DataError

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
class MappedFile:
    """A file as it was when it was mapped. One that was replaced or removed since is still mapped as it was.

    Attributes:
        path: Its path.
        status: Its device, inode, size and mtime in nanoseconds.
    """

    path: Path
    status: tuple[int, int, int, int]

    @classmethod
    def of(cls, path: Path) -> MappedFile:
        """Return a file as it is now. Raises OSError."""
        now = path.stat()
        return cls(path, (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns))

    def check(self) -> None:
        """Raise DataError if the file was overwritten in place, and what is mapped has changed with it."""
        try:
            now = MappedFile.of(self.path).status
        except OSError:
            return
        if now[:2] == self.status[:2] and now != self.status:
            raise DataError(
                f"{self.path} was overwritten while it was mapped: it had {self.status[2]:,} bytes and has {now[2]:,}. "
                "What was read since may be other data: restore it, and resume from the last checkpoint. To change the "
                "data of a run, write a new file and pass --override-data sources"
            )


@dataclass(frozen=True)
class TokenStore:
    """The training or the held-out documents of one source, as ids, each followed by the end token.

    Attributes:
        tokens: [N] of an integer dtype, memory-mapped; the concatenated documents.
        offsets: [D + 1] int64, memory-mapped; document d is tokens[offsets[d] : offsets[d + 1]].
        notes: Messages about the source for the log.
        files: The files that are mapped.
    """

    tokens: Tokens
    offsets: Offsets
    notes: tuple[str, ...] = ()
    files: tuple[MappedFile, ...] = ()

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
