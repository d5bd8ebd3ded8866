"""Samples as pure functions of (seed, number): what is cut from a token store, in which order, and the decoder's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megapar.data.sampling.counts import PieceCounts
from megapar.data.sampling.permutation import Permutation
from megapar.data.tokens.store import TokenStore
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Sample = dict[str, "np.ndarray"]

NO_LOSS = -100
"""The label of a position that enters no loss."""


class Samples(Protocol):
    """Samples by number. Training goes on for ever, epoch after epoch; held-out samples start again at the end."""

    def __len__(self) -> int:
        """Number of different samples: those of one epoch."""

    def __getitem__(self, number: int) -> Sample:
        """Sample ``number`` of the run, any number from 0 on."""


class TokenPieces(Protocol):
    """Pieces of a token store by number; a sample is made from one of them."""

    def __len__(self) -> int:
        """Number of pieces."""

    def __getitem__(self, number: int) -> np.ndarray:
        """[T] int64: the ids of a piece, 0 <= number < len."""


@dataclass(frozen=True)
class Windows:
    """The documents joined by their end tokens, cut in windows of ``length`` + 1 ids; neighbours share one id.

        store    a b c E d e f E g h i E ...      (E: end token)
        length 4 a b c E d
                         d e f E g
                                 g h i E ...

    What is left over at the end is not used, so that every window is full. shortest: where the whole store
    is shorter than a window, it is one window by itself if it has this many ids.
    Raises DataError where there is not even one window.
    """

    store: TokenStore
    length: int
    shortest: int | None = None

    def __post_init__(self) -> None:
        have = len(self.store.tokens)
        if have < (self.shortest or self.length + 1):
            raise DataError(
                f"the corpus has {have} tokens, fewer than one sample of {self.length} + 1; "
                "give more text or a smaller --seq-length"
            )

    def __len__(self) -> int:
        return max(1, (len(self.store.tokens) - 1) // self.length)

    def __getitem__(self, number: int) -> np.ndarray:
        import numpy as np

        start = number * self.length
        return np.asarray(self.store.tokens[start : start + self.length + 1], dtype=np.int64)


class DocumentWindows:
    """Documents apart: each cut in windows of at most ``length`` + 1 ids that share one id, the last one shorter.

    Of documents with fewer than two ids nothing is used. Raises DataError where nothing is left.
    """

    def __init__(self, store: TokenStore, length: int) -> None:
        self._store = store
        self._length = length
        self._counts = PieceCounts(store.offsets, lambda lengths: (lengths + length - 2).clip(0) // length)
        if self._counts.total == 0:
            raise DataError("no document of the corpus has two tokens, so that one could be predicted")

    def __len__(self) -> int:
        return self._counts.total

    def __getitem__(self, number: int) -> np.ndarray:
        import numpy as np

        document, part, _ = self._counts.find(number)
        start, end = (int(n) for n in self._store.offsets[document : document + 2])
        begin = start + part * self._length
        until = min(begin + self._length + 1, end)
        ids = np.asarray(self._store.tokens[begin:until], dtype=np.int64)
        if len(ids) != until - begin or len(ids) < 2:
            have = len(self._store.tokens)
            raise DataError(
                f"document {document} of the corpus is tokens {start} to {end}, where there are {have}: its index is "
                "damaged, and megapar data check PREFIX says where"
            )
        return ids


class PieceOrder(Protocol):
    """Maps the number of a sample to that of its piece."""

    def __getitem__(self, number: int) -> int: ...


@runtime_checkable
class Ordered(Protocol):
    """Pieces that bring an order."""

    def order(self, seed: int | None, stream: str) -> PieceOrder:
        """The order of a run; of held-out pieces, which no seed changes, where there is none."""


@runtime_checkable
class Beside(Protocol):
    """Pieces that are cheap to read after one near them was read."""

    def beside(self, number: int) -> range:
        """Pieces that cost nothing more where piece ``number`` has been read."""


def beside(pieces: TokenPieces, number: int) -> range:
    """The pieces that may be read beside one of them: all, unless they say otherwise."""
    return pieces.beside(number) if isinstance(pieces, Beside) else range(len(pieces))


class Order:
    """Every piece once per epoch, each epoch in a new order."""

    def __init__(self, pieces: int, seed: int, stream: str) -> None:
        self._pieces = pieces
        self._epoch = lru_cache(maxsize=2)(lambda epoch: Permutation(pieces, seed, f"{stream}/{epoch}"))

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, self._pieces)
        return self._epoch(epoch)[place]


class InOrder:
    """The pieces in the order of their numbers, again and again."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces

    def __getitem__(self, number: int) -> int:
        return number % self._pieces


def order_of(pieces: TokenPieces, seed: int | None, stream: str) -> PieceOrder:
    """The order in which a run takes these pieces. seed: None keeps the pieces' own. stream: what the order is for."""
    if isinstance(pieces, Ordered):
        return pieces.order(seed, stream)
    return InOrder(len(pieces)) if seed is None else Order(len(pieces), seed, stream)


@dataclass(frozen=True)
class Boundaries:
    """The meaning of the end of a document inside a packed sample. A document ends with its end token.

    end: the end token. reset_positions: positions count from 0 in every document. reset_attention: no position sees
    another document. mask_loss: nothing is predicted at an end token, whose label begins another document.
    """

    end: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False


class DecoderSamples:
    """Samples for a causal model: ``tokens`` [S] and ``labels`` [S] int64, the labels one position ahead.

    A piece shorter than S + 1 is padded: its tokens with id 0, its labels with NO_LOSS, and only then there is
    ``valid`` [S] bool. Where boundaries need them there are ``positions`` [S] and ``ends`` [documents], both int64:
    the position after each document of the sample, the last one S.
    """

    def __init__(
        self, pieces: TokenPieces, seq_length: int, seed: int | None, boundaries: Boundaries | None = None
    ) -> None:
        """pieces: of S + 1 ids. seq_length: S. seed: of the order; None keeps the pieces' own (held-out)."""
        self._pieces = pieces
        self._seq_length = seq_length
        self._order = order_of(pieces, seed, "windows")
        self._boundaries = boundaries

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Sample:
        import numpy as np

        ids = self._pieces[self._order[number]]
        short = self._seq_length + 1 - len(ids)
        sample = {"tokens": ids[:-1], "labels": ids[1:]}
        if self._boundaries is not None:
            sample = self._bounded(sample, self._boundaries)
        if short:
            sample["tokens"] = np.pad(sample["tokens"], (0, short))
            sample["labels"] = np.pad(sample["labels"], (0, short), constant_values=NO_LOSS)
            sample["valid"] = np.arange(self._seq_length) < len(ids) - 1
        return sample

    def _bounded(self, sample: Sample, boundaries: Boundaries) -> Sample:
        import numpy as np

        tokens = sample["tokens"]
        at_end = tokens == boundaries.end
        starts = np.flatnonzero(at_end) + 1  # of the documents after the first one
        starts = starts[starts < len(tokens)]
        if boundaries.mask_loss:
            sample["labels"] = np.where(at_end, NO_LOSS, sample["labels"])
        if boundaries.reset_positions:
            positions = np.arange(self._seq_length, dtype=np.int64)
            begun = np.zeros(self._seq_length, dtype=np.int64)
            begun[starts] = starts
            sample["positions"] = positions - np.maximum.accumulate(begun)
        if boundaries.reset_attention:
            sample["ends"] = np.append(starts, self._seq_length)
        return sample
