"""Token stores: a corpus as ids in memory-mapped files, made once per (corpus, tokenizer, split)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megapar.data.cache import digest, made_once
from megapar.data.source import Source, all_documents, place_of, sources_hash
from megapar.data.tokenizer import Tokenizer
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
"""Raised whenever the files written here change, so that no older cache entry is read."""

_BATCH = 256  # documents encoded at a time


@dataclass(frozen=True)
class TokenStore:
    """The documents of one side of a corpus, as ids, each followed by the end token.

    tokens: [N] uint16 or uint32, memory-mapped; the documents one after the other.
    offsets: [D + 1] int64, memory-mapped; document d is tokens[offsets[d] : offsets[d + 1]].
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def documents(self) -> int:
        """Number of documents, D."""
        return len(self.offsets) - 1

    def counts(self, size: int) -> np.ndarray:
        """[size] int64: how often each id occurs."""
        import numpy as np

        total = np.zeros(size, dtype=np.int64)
        for start in range(0, len(self.tokens), 1 << 22):
            total += np.bincount(self.tokens[start : start + (1 << 22)], minlength=size)
        return total


class Stores(NamedTuple):
    """The two sides of a corpus."""

    train: TokenStore
    heldout: TokenStore


@dataclass(frozen=True)
class Split:
    """Which documents are trained on and which are held out: shares of [0, 1), by each text's hash.

    train, heldout: shares of the documents; what they leave is used by neither.
    """

    train: float
    heldout: float

    @classmethod
    def parse(cls, text: str) -> Split:
        """``95,5`` or ``969,30,1``: weights of training, held-out and unused documents; raises DataError."""
        try:
            weights = [float(part) for part in text.split(",")]
        except ValueError:
            weights = []
        if len(weights) not in (2, 3) or min(weights) < 0 or weights[0] <= 0 or weights[1] <= 0:
            raise DataError(
                f"the split {text!r} is not two or three weights, the first two above 0; write 95,5 or 969,30,1"
            )
        return cls(weights[0] / sum(weights), weights[1] / sum(weights))

    def side(self, text: str) -> int | None:
        """0: trained on; 1: held out; None: neither."""
        place = place_of(text)
        if place < self.train:
            return 0
        return 1 if place < self.train + self.heldout or self.train + self.heldout > 1 - 1e-9 else None


def open_stores(
    train: Sequence[Source], heldout: Sequence[Source] | None, split: Split, tokenizer: Tokenizer
) -> Stores:
    """The stores of a corpus, encoded where the cache does not have them yet.

    heldout: sources whose documents are all held out; None takes them from ``train`` by ``split``.
    Raises DataError where a source is broken, or where one side has no document.
    """
    end = tokenizer.special.need("eos")
    halves = "apart" if heldout is not None else f"{split.train!r},{split.heldout!r}"
    hashes = sources_hash(train), "" if heldout is None else sources_hash(heldout)
    key = digest(str(VERSION), *hashes, halves, tokenizer.fingerprint(), str(end))

    def make(folder: Path) -> None:
        folder.mkdir()
        names = ", ".join(source.name for source in (*train, *(heldout or ())))
        sides = _sides(train, heldout, split)
        _encode(folder, sides, tokenizer, end, names)

    folder = made_once(f"tokens/{key}", make)
    return Stores(_opened(folder, "train"), _opened(folder, "heldout"))


def _sides(train: Sequence[Source], heldout: Sequence[Source] | None, split: Split) -> Iterator[tuple[int, str]]:
    """Every document with the side it belongs to."""
    for text in all_documents(train):
        side = 0 if heldout is not None else split.side(text)
        if side is not None:
            yield side, text
    for text in all_documents(heldout or ()):
        yield 1, text


def _encode(folder: Path, documents: Iterable[tuple[int, str]], tokenizer: Tokenizer, end: int, names: str) -> None:
    """Write both stores in one pass over the documents, a batch of them in memory at a time."""
    kind = "uint16" if tokenizer.size <= 1 << 16 else "uint32"
    writers = _Writer(folder / "train", kind), _Writer(folder / "heldout", kind)
    try:
        for batch in _batches(documents):
            for (side, _), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
                writers[side].add([*ids, end])
    finally:
        for writer in writers:
            writer.close()
    train, heldout = (writer.documents for writer in writers)
    if train + heldout == 0:
        raise DataError(f"{names}: the corpus holds no documents")
    if train == 0 or heldout == 0:
        raise DataError(
            f"{names}: {train + heldout} documents are {train} to train on and {heldout} held out, and both need "
            "at least one; give --eval-data-path or a corpus of more documents"
        )


def _batches(documents: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class _Writer:
    """Writes one store: raw ids as they come, offsets at the end."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self._kind = kind
        self._file = open(path.with_suffix(f".{kind}"), "wb")  # noqa: SIM115, closed by close()
        self._offsets = [0]

    @property
    def documents(self) -> int:
        return len(self._offsets) - 1

    def add(self, ids: list[int]) -> None:
        import numpy as np

        self._file.write(np.array(ids, dtype=self._kind).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))

    def close(self) -> None:
        import numpy as np

        self._file.close()
        np.save(self._path.with_suffix(".offsets.npy"), np.array(self._offsets, dtype=np.int64))


def _opened(folder: Path, side: str) -> TokenStore:
    import numpy as np

    path = next(folder.glob(f"{side}.uint*"))
    tokens = np.memmap(path, dtype=path.suffix[1:], mode="r")
    return TokenStore(tokens, np.load(folder / f"{side}.offsets.npy", mmap_mode="r"))
