"""Documents of an indexed file as stores: a stretch of them, or those that the hash of their text selects."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.data.tokens.cache import digest, made_once
from megapar.data.tokens.indexed import IndexedDataset
from megapar.data.tokens.prepared import hashes_path, index_hash, read_hashes
from megapar.data.tokens.remembered import remembered
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.store import TokenStore

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 1 << 20  # documents at a time


def split_stores(dataset: IndexedDataset, split: Split, notes: tuple[str, ...] = ()) -> TrainHeldout[TokenStore]:
    """The training and the held-out documents of an indexed file. notes: of its text, for the training store.

    Split by the texts' hashes where PREFIX.hashes has them; otherwise by the documents' numbers, which is noted. Raises
    DataError where that file is damaged or belongs to another index.
    """
    hashes = read_hashes(dataset.prefix, dataset.documents)
    if split.trains_all:
        return TrainHeldout(indexed_store(dataset, 0, dataset.documents, notes), None)
    if hashes is None:
        first, last = split.cuts(dataset.documents)
        note = (
            f"{dataset.prefix}: documents are split by their numbers, as there is no "
            f"{hashes_path(dataset.prefix).name} beside it (megapar data prepare writes one)"
        )
        cut = first < dataset.documents
        heldout = indexed_store(dataset, first, last) if split.heldout else None
        return TrainHeldout(indexed_store(dataset, 0, first, (*notes, note) if cut else notes), heldout)
    key = digest(index_hash(dataset.prefix), _hash_of(hashes), f"{split.train!r},{split.heldout!r}")
    folder = made_once(f"selected/{key}", lambda path: _select(path, dataset, hashes, split))
    heldout = _selected(dataset, folder / "1") if split.heldout else None
    return TrainHeldout(_selected(dataset, folder / "0", notes), heldout)


def _hash_of(hashes: np.ndarray) -> str:
    import hashlib

    path = Path(str(hashes.filename))  # type: ignore[attr-defined]

    def read() -> str:
        state = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
        return state.hexdigest()

    return remembered(path, read)


def _select(folder: Path, dataset: IndexedDataset, hashes: np.ndarray, split: Split) -> None:
    """Write where the documents of each side begin in the file, and where they do one after the other."""
    import numpy as np

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
    import numpy as np

    def mapped(name: str) -> np.ndarray:
        """The array itself: a slice of a memmap takes ten times as long."""
        file = path.with_suffix(name)
        return np.asarray(np.memmap(file, dtype="<i8", mode="r") if file.stat().st_size else np.empty(0, dtype="<i8"))

    starts, offsets = mapped(".starts"), mapped(".offsets")
    return TokenStore(SelectedTokens(dataset.tokens, starts, offsets), offsets, notes)


class SelectedTokens:
    """The tokens of some documents, one after the other, put together as they are read."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, offsets: np.ndarray) -> None:
        """tokens: of the whole file. starts: [D], where each document begins in it; offsets: [D + 1], and here."""
        self._tokens, self._starts, self._offsets = tokens, starts, offsets

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, places: slice) -> np.ndarray:
        import numpy as np

        first, last, _ = places.indices(len(self))
        if last <= first:
            return self._tokens[:0]
        begin = int(self._offsets.searchsorted(first, side="right")) - 1
        end = int(self._offsets.searchsorted(last, side="left"))
        moved, moved_last = (int(self._starts[one]) - int(self._offsets[one]) for one in (begin, end - 1))
        if moved == moved_last:  # every document between them was selected, too
            return self._tokens[first + moved : last + moved]
        # Documents that follow each other in the file are read at once.
        shift = np.asarray(self._starts[begin:end]) - self._offsets[begin:end]
        runs = begin + np.concatenate(([0], np.flatnonzero(np.diff(shift)) + 1, [end - begin]))
        pieces = []
        for one, following in pairwise(runs):
            moved = int(shift[one - begin])
            start, stop = max(first, int(self._offsets[one])), min(last, int(self._offsets[following]))
            pieces.append(self._tokens[start + moved : stop + moved])
        return np.concatenate(pieces)


def indexed_store(dataset: IndexedDataset, first: int, last: int, notes: tuple[str, ...] = ()) -> TokenStore:
    """Documents first .. last - 1 of an indexed file. Costs the same for any number of them."""
    offsets = DocumentOffsets(dataset, first, last)
    start, end = dataset.document_start(first), dataset.document_start(last)
    return TokenStore(dataset.tokens[start:end], offsets, notes)


class DocumentOffsets:
    """[D + 1]: where the documents of a stretch begin, counted from its first token; read from the index."""

    def __init__(self, dataset: IndexedDataset, first: int, last: int) -> None:
        self._dataset = dataset
        self._first = first
        self._length = last - first + 1
        self._base = dataset.document_start(first)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> Any:
        import numpy as np

        start, stop, _ = places.indices(self._length)
        dataset = self._dataset
        sequences = np.asarray(dataset.document_indices[self._first + start : self._first + stop])
        inside = sequences < len(dataset)  # documents at the end of the file begin where its last token ends
        starts = np.full(len(sequences), len(dataset.tokens), dtype=np.int64)
        starts[inside] = dataset.pointers[sequences[inside]] // dataset.dtype.itemsize
        return starts - self._base
