"""Token stores: documents as ids in memory-mapped files, and the stores of the two sides of an indexed file's split.

PREFIX.hashes exists    split by the hashes of the documents' texts, as the text itself would be
otherwise               split by the documents' numbers, those for training first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from megapar.data.cache import cached_value, hash_parts, make_once
from megapar.data.lazy_numpy import np
from megapar.data.tokens.indexed import IndexedDataset, MappedFile
from megapar.data.tokens.prepared import hashes_path, index_hash, read_hashes
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.files.location import at


class SlicedArray(Protocol):
    """A one-dimensional array that is read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice) -> np.ndarray: ...


@dataclass(frozen=True)
class TokenStore:
    """The training or the held-out documents of one source, as ids, with the end tokens that they were encoded with.

    Attributes:
        tokens: [N] of an integer dtype, memory-mapped; the concatenated documents.
        offsets: [D + 1] int64, memory-mapped; document d is tokens[offsets[d] : offsets[d + 1]].
        notes: Messages about the source for the log.
    """

    tokens: SlicedArray
    offsets: SlicedArray
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


_BLOCK = 1 << 20  # documents at a time


def split_stores(dataset: IndexedDataset, split: Split, notes: tuple[str, ...]) -> TrainHeldout[TokenStore]:
    """Return the training and the held-out documents of an indexed file.

    Documents are split by the hashes in PREFIX.hashes, or without it by their numbers; a note says so if any are cut.
    ``notes`` about the text go to the training store. Raises DataError if PREFIX.hashes is damaged or belongs to
    another index.
    """
    hashes, path = read_hashes(dataset.prefix, dataset.documents), hashes_path(dataset.prefix)
    if split.trains_all:
        return TrainHeldout(indexed_store(dataset, 0, dataset.documents, notes), None)
    if hashes is None:
        first, last = split.cuts(dataset.documents)
        note = (
            f"{dataset.prefix}: documents are split by their numbers, because it has no file {path.name} "
            "(megapar data prepare writes one)"
        )
        cut = first < dataset.documents
        heldout = indexed_store(dataset, first, last) if split.heldout else None
        return TrainHeldout(indexed_store(dataset, 0, first, (*notes, note) if cut else notes), heldout)
    digest = cached_value(path, lambda: at(path).sha256())
    key = hash_parts(index_hash(dataset.prefix), digest, f"{split.train!r},{split.heldout!r}")
    folder = make_once(f"selected/{key}", lambda made: _select(made, dataset, hashes, split))
    heldout = _selected(dataset, folder / "1") if split.heldout else None
    return TrainHeldout(_selected(dataset, folder / "0", notes), heldout)


def _select(folder: Path, dataset: IndexedDataset, hashes: np.ndarray, split: Split) -> None:
    """Write the offset of each side's documents in the file, and in the concatenation of the side's documents."""
    folder.mkdir()
    offsets, ends = DocumentOffsets(dataset, 0, dataset.documents), [0, 0]
    for side in (0, 1):
        np.zeros(1, dtype="<i8").tofile(folder / f"{side}.offsets")
        (folder / f"{side}.starts").touch()
    for first in range(0, dataset.documents, _BLOCK):
        last = min(first + _BLOCK, dataset.documents)
        edges = offsets[first : last + 1]
        sides = split.sides(hashes[first:last].astype(np.float64) / 2.0**64)
        for side in (0, 1):
            mine = sides == side
            along = ends[side] + np.cumsum(np.diff(edges)[mine])
            for name, array in (("starts", edges[:-1][mine]), ("offsets", along)):
                with (folder / f"{side}.{name}").open("ab") as file:
                    file.write(array.astype("<i8").tobytes())
            ends[side] = int(along[-1]) if len(along) else ends[side]


def _selected(dataset: IndexedDataset, path: Path, notes: tuple[str, ...] = ()) -> TokenStore:
    def mapped(name: str) -> np.ndarray:
        """Return a plain array: a slice of a memmap takes ten times as long."""
        file = path.with_suffix(name)
        return np.asarray(np.memmap(file, dtype="<i8", mode="r") if file.stat().st_size else np.empty(0, dtype="<i8"))

    files = (*dataset.files, *(MappedFile.of(path.with_suffix(name)) for name in (".starts", ".offsets")))
    starts, offsets = mapped(".starts"), mapped(".offsets")
    return TokenStore(SelectedTokens(dataset.tokens, starts, offsets), offsets, notes, files)


class SelectedTokens:
    """The concatenated tokens of selected documents, assembled as they are read."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, offsets: np.ndarray) -> None:
        """Select documents.

        Args:
            tokens: ids of the whole file.
            starts: [D], the index in ``tokens`` where each selected document begins.
            offsets: [D + 1], the index in the concatenation where each one begins, and its end.
        """
        self._tokens, self._starts, self._offsets = tokens, starts, offsets

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        first, last, _ = places.indices(len(self))
        if last <= first:
            return self._tokens[:0]
        begin = int(self._offsets.searchsorted(first, side="right")) - 1
        end = int(self._offsets.searchsorted(last, side="left"))
        moved, moved_last = (int(self._starts[i]) - int(self._offsets[i]) for i in (begin, end - 1))
        if moved == moved_last:  # every document between them is selected as well
            return self._tokens[first + moved : last + moved]
        # Documents that are consecutive in the file are read at once.
        shift = np.asarray(self._starts[begin:end]) - self._offsets[begin:end]
        runs = begin + np.concatenate(([0], np.flatnonzero(np.diff(shift)) + 1, [end - begin]))
        pieces = []
        for one, following in pairwise(runs):
            moved = int(shift[one - begin])
            start, stop = max(first, int(self._offsets[one])), min(last, int(self._offsets[following]))
            pieces.append(self._tokens[start + moved : stop + moved])
        return np.concatenate(pieces)


def indexed_store(dataset: IndexedDataset, first: int, last: int, notes: tuple[str, ...] = ()) -> TokenStore:
    """Return documents first .. last - 1 of an indexed file as a store, at the same cost for any number of them."""
    offsets = DocumentOffsets(dataset, first, last)
    start, end = dataset.document_start(first), dataset.document_start(last)
    return TokenStore(dataset.tokens[start:end], offsets, notes, dataset.files)


class DocumentOffsets:
    """Offsets [D + 1] of a range of documents from its first token, read from the index."""

    def __init__(self, dataset: IndexedDataset, first: int, last: int) -> None:
        self._dataset = dataset
        self._first = first
        self._length = last - first + 1
        self._base = dataset.document_start(first)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> Any:
        start, stop, _ = places.indices(self._length)
        dataset = self._dataset
        sequences = np.asarray(dataset.document_indices[self._first + start : self._first + stop])
        inside = sequences < len(dataset)  # documents at the end of the file begin where its last token ends
        starts = np.full(len(sequences), len(dataset.tokens), dtype=np.int64)
        starts[inside] = dataset.pointers[sequences[inside]] // dataset.dtype.itemsize
        return starts - self._base
