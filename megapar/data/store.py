"""Token stores: a corpus as ids in memory-mapped files, made once per (corpus, tokenizer, split)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megapar.config.record import LONGEST_LINE
from megapar.data.cache import digest, made_once
from megapar.data.source import BadRecords, Source, all_documents, place_of, sources_hash
from megapar.data.tokenizer import Tokenizer
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
"""Raised whenever the files written here change, so that no older cache entry is read."""

_BATCH = 256  # documents encoded at a time
_NOTES = "notes.json"


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
    """The documents of one side of a corpus, as ids, each followed by the end token.

    tokens: [N] of some integer dtype, memory-mapped; the documents one after the other.
    offsets: [D + 1] int64, memory-mapped; document d is tokens[offsets[d] : offsets[d + 1]].
    notes: what people should know of it.
    """

    tokens: Tokens
    offsets: Offsets
    notes: tuple[str, ...] = ()

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
    """The two sides of a corpus. heldout: None where the split holds nothing out."""

    train: TokenStore
    heldout: TokenStore | None


@dataclass(frozen=True)
class Split:
    """Which documents are trained on and which are held out: shares of [0, 1), by each text's hash.

    Files of tokens whose texts nobody has hashed are cut by the documents' numbers instead.

    train, heldout: shares of the documents; what they leave is used by neither. heldout may be 0.
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
        if len(weights) not in (2, 3) or min(weights) < 0 or weights[0] <= 0:
            raise DataError(
                f"the split {text!r} is not two or three weights, the first one above 0; write 95,5 or 969,30,1"
            )
        return cls(weights[0] / sum(weights), weights[1] / sum(weights))

    def side(self, text: str) -> int | None:
        """0: trained on; 1: held out; None: neither."""
        place = place_of(text)
        if place < self.train or (self.heldout == 0 and self.train > 1 - 1e-9):
            return 0
        if self.heldout == 0:
            return None
        return 1 if place < self.train + self.heldout or self.train + self.heldout > 1 - 1e-9 else None

    def sides(self, places: np.ndarray) -> np.ndarray:
        """[n] int8: ``side`` of documents by their places in [0, 1), -1 for neither."""
        import numpy as np

        all_trained = self.heldout == 0 and self.train > 1 - 1e-9
        rest_held_out = self.train + self.heldout > 1 - 1e-9
        found = np.full(len(places), -1, dtype=np.int8)
        if self.heldout:
            found[(places < self.train + self.heldout) | rest_held_out] = 1
        found[(places < self.train) | all_trained] = 0
        return found

    def cuts(self, documents: int) -> tuple[int, int]:
        """Where the documents trained on end, and where the held-out ones behind them do."""
        train = round(documents * self.train)
        return train, max(train, min(documents, round(documents * (self.train + self.heldout))))


def open_stores(
    train: Sequence[Source],
    heldout: Sequence[Source] | None,
    split: Split,
    tokenizer: Tokenizer,
    *,
    skip_bad: bool = False,
) -> Stores:
    """The stores of a corpus, encoded where the cache does not have them yet.

    heldout: sources whose documents are all held out; None takes them from ``train`` by ``split``.
    skip_bad: broken records are left out and counted, see ``notes``.
    Raises DataError where a source is broken, or where one side has no document.
    """
    end = tokenizer.special.need("eos")
    halves = "apart" if heldout is not None else f"{split.train!r},{split.heldout!r}"
    hashes = sources_hash(train), "" if heldout is None else sources_hash(heldout)
    key = _key(tokenizer, end, skip_bad, *hashes, halves)

    def make(folder: Path) -> None:
        folder.mkdir()
        bad = BadRecords(stops=not skip_bad)
        train_documents, heldout_documents = _encode(folder, _sides(train, heldout, split, bad), tokenizer, end, bad)
        names = ", ".join(source.name for source in (*train, *(heldout or ())))
        total = train_documents + heldout_documents
        if total == 0:
            raise DataError(f"{names}: the corpus holds no documents")
        wanted = heldout is not None or split.heldout > 0
        if train_documents == 0 or (wanted and heldout_documents == 0):
            raise DataError(
                f"{names}: of {total} documents {train_documents} are to train on and {heldout_documents} held out, "
                "and both need at least one; give more documents, --eval-data-path, or --split 100,0 with "
                "--eval-interval 0"
            )

    folder = made_once(f"tokens/{key}", make)
    nothing = heldout is None and split.heldout == 0
    return Stores(_opened(folder, "train"), None if nothing else _opened(folder, "heldout"))


def open_store(sources: Sequence[Source], tokenizer: Tokenizer, *, skip_bad: bool = False) -> TokenStore:
    """All documents of the sources, encoded where the cache does not have them yet. Raises DataError as open_stores."""
    end = tokenizer.special.need("eos")
    key = _key(tokenizer, end, skip_bad, sources_hash(sources), "whole")

    def make(folder: Path) -> None:
        folder.mkdir()
        bad = BadRecords(stops=not skip_bad)
        documents = ((0, text) for text in all_documents(sources, bad))
        if _encode(folder, documents, tokenizer, end, bad)[0] == 0:
            raise DataError(f"{', '.join(source.name for source in sources)}: the corpus holds no documents")

    return _opened(made_once(f"tokens/{key}", make), "train")


def _key(tokenizer: Tokenizer, end: int, skip_bad: bool, *content: str) -> str:
    """Of an entry. content: hashes of the files, and how they are split.

    How long a document may be is not in those: they name the same bytes, whoever reads them.
    """
    skipping = ("skip",) if skip_bad else ()
    return digest(str(VERSION), str(LONGEST_LINE), *content, tokenizer.fingerprint(), str(end), *skipping)


def _sides(
    train: Sequence[Source], heldout: Sequence[Source] | None, split: Split, bad: BadRecords
) -> Iterator[tuple[int, str]]:
    """Every document with the side it belongs to."""
    for text in all_documents(train, bad):
        side = 0 if heldout is not None else split.side(text)
        if side is not None:
            yield side, text
    for text in all_documents(heldout or (), bad):
        yield 1, text


def _encode(
    folder: Path, documents: Iterable[tuple[int, str]], tokenizer: Tokenizer, end: int, bad: BadRecords
) -> tuple[int, int]:
    """Write both stores in one pass, a batch of documents in memory at a time; how many documents each has."""
    kind = "uint16" if tokenizer.size <= 1 << 16 else "uint32"
    writers = _Writer(folder / "train", kind), _Writer(folder / "heldout", kind)
    try:
        for batch in _batches(documents):
            for (side, _), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
                writers[side].add([*ids, end])
    finally:
        for writer in writers:
            writer.close()
    if bad.count:
        (folder / _NOTES).write_text(json.dumps([str(bad)]), encoding="utf-8")
    return writers[0].documents, writers[1].documents


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
    notes = json.loads((folder / _NOTES).read_text(encoding="utf-8")) if (folder / _NOTES).exists() else ()
    return TokenStore(tokens, np.load(folder / f"{side}.offsets.npy", mmap_mode="r"), tuple(notes))
