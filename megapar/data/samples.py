"""Samples as pure functions of (seed, number): what is cut from a token store, in which order, and the decoder's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from megapar.data.permutation import Permutation
from megapar.data.store import TokenStore
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


class Pieces(Protocol):
    """Pieces of a token store, by number; what one sample is made from."""

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


class Order:
    """Which piece sample ``number`` of the run is made from: every piece once per epoch, each epoch in a new order."""

    def __init__(self, pieces: int, seed: int, stream: str) -> None:
        self._pieces = pieces
        self._epoch = lru_cache(maxsize=2)(lambda epoch: Permutation(pieces, seed, f"{stream}/{epoch}"))

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, self._pieces)
        return self._epoch(epoch)[place]


class DecoderSamples:
    """Samples for a causal model: ``tokens`` [S] and ``labels`` [S] int64, the labels one position ahead.

    A piece shorter than S + 1 is padded: its tokens with id 0, its labels with NO_LOSS, and only then there is
    ``valid`` [S] bool.
    """

    def __init__(self, pieces: Pieces, seq_length: int, seed: int | None) -> None:
        """pieces: of S + 1 ids. seq_length: S. seed: of the order; None keeps the pieces' own (held-out)."""
        self._pieces = pieces
        self._seq_length = seq_length
        self._order = None if seed is None else Order(len(pieces), seed, "windows")

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Sample:
        import numpy as np

        place = self._order[number] if self._order else number % len(self._pieces)
        ids = self._pieces[place]
        short = self._seq_length + 1 - len(ids)
        if not short:
            return {"tokens": ids[:-1], "labels": ids[1:]}
        return {
            "tokens": np.pad(ids[:-1], (0, short)),
            "labels": np.pad(ids[1:], (0, short), constant_values=NO_LOSS),
            "valid": np.arange(self._seq_length) < len(ids) - 1,
        }
