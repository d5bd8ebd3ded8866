"""Samples as pure functions of (seed, number): pieces of a token store, their order, and a decoder's samples."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

from megapar.data.lazy_numpy import np
from megapar.data.sampling.counts import PieceCounts
from megapar.data.sampling.draws import Draws, Permutation
from megapar.data.tokens.store import TokenStore
from megapar.errors import DataError
from megapar.model.sizes import NO_LOSS as NO_LOSS

Sample = dict[str, "np.ndarray"]

WEIGHTS = "weights"
_HELD_OUT_SEED = 0  # never another one: the losses of two evaluations compare only over the same samples


class Samples(Protocol):
    """Samples by number. Training samples continue forever, epoch after epoch; held-out samples repeat."""

    def __len__(self) -> int:
        """Return the number of samples of one epoch."""

    def __getitem__(self, number: int) -> Sample:
        """Return sample ``number`` of the run, any number >= 0."""


class TokenPieces(Protocol):
    """Pieces of a token store by number; a sample is made from one of them."""

    def __len__(self) -> int:
        """Return the number of pieces."""

    def __getitem__(self, number: int) -> np.ndarray:
        """Return [T] int64, the ids of a piece, 0 <= number < len."""


class DocumentPieces(TokenPieces, Protocol):
    """Token pieces with the number of their document."""

    def document(self, number: int) -> int:
        """Return the number of the document that piece ``number`` is from; each document has its own number."""


@dataclass(frozen=True)
class Windows:
    """The documents joined by their end tokens and cut into windows of ``length`` + 1 ids; neighbours share one id.

        store    a b c E d e f E g h i E ...      (E: end token)
        length 4 a b c E d
                         d e f E g
                                 g h i E ...

    Every window is full, so the last ids of the store may not be used. Raises DataError if the store is too short.

    Attributes:
        store: The documents.
        length: S.
        shortest: A store shorter than one window becomes one window if it has at least this many ids; None refuses it.
    """

    store: TokenStore
    length: int
    shortest: int | None = None

    def __post_init__(self) -> None:
        have = len(self.store.tokens)
        if have < (self.shortest or self.length + 1):
            raise DataError(
                f"the corpus has {have} tokens, fewer than one sample of {self.length} + 1; "
                "pass more text or a smaller --seq-length"
            )

    def __len__(self) -> int:
        return max(1, (len(self.store.tokens) - 1) // self.length)

    def __getitem__(self, number: int) -> np.ndarray:
        start = number * self.length
        return np.asarray(self.store.tokens[start : start + self.length + 1], dtype=np.int64)


class DocumentWindows:
    """Each document by itself, cut into windows of at most ``length`` + 1 ids; neighbours share one id.

    Documents with fewer than two ids are not used. Raises DataError if no window remains.
    """

    def __init__(self, store: TokenStore, length: int) -> None:
        self._store = store
        self._length = length
        self._counts = PieceCounts(store.offsets, lambda lengths: (lengths + length - 2).clip(0) // length)
        if self._counts.total == 0:
            raise DataError("no document of the corpus has two tokens, the minimum for one prediction")

    def __len__(self) -> int:
        return self._counts.total

    def __getitem__(self, number: int) -> np.ndarray:
        document, part, _ = self._counts.find(number)
        start, end = (int(n) for n in self._store.offsets[document : document + 2])
        begin = start + part * self._length
        until = min(begin + self._length + 1, end)
        ids = np.asarray(self._store.tokens[begin:until], dtype=np.int64)
        if len(ids) != until - begin or len(ids) < 2:
            have = len(self._store.tokens)
            raise DataError(
                f"document {document} of the corpus is tokens {start} to {end}, but there are {have}: its index is "
                "damaged; run megapar data check PREFIX to find the place"
            )
        return ids


class WeightedPiece(NamedTuple):
    """The ids [T] int64 of a piece.

    Attributes:
        weights: [T] fp32 >= 0, the weight of each id as a target; None if all are 1.
        starts: [documents] int64, the index where each document begins; None if tokens mark their ends.
    """

    ids: np.ndarray
    weights: np.ndarray | None = None
    starts: np.ndarray | None = None


@runtime_checkable
class Weighted(Protocol):
    """Pieces whose ids may have weights in the loss."""

    def weighted(self, number: int) -> WeightedPiece:
        """Return a piece with its weights."""


def weighted(pieces: TokenPieces, number: int) -> WeightedPiece:
    """Return a piece with its weights, see ``Weighted``; without any unless the pieces have them."""
    return pieces.weighted(number) if isinstance(pieces, Weighted) else WeightedPiece(pieces[number])


class PieceOrder(Protocol):
    """Maps the number of a sample to that of its piece."""

    def __getitem__(self, number: int) -> int: ...


@runtime_checkable
class Ordered(Protocol):
    """Pieces that define their order."""

    def order(self, seed: int, stream: str) -> PieceOrder:
        """Return the order of a run. ``stream`` is the purpose of the order."""


@runtime_checkable
class Nearby(Protocol):
    """Pieces that are cheap to read after one near them was read."""

    def nearby(self, number: int) -> range:
        """Return the pieces that cost nothing more after piece ``number`` has been read."""


def nearby(pieces: TokenPieces, number: int) -> range:
    """Return the pieces that are cheap to read after one of them: all, unless the pieces define fewer."""
    return pieces.nearby(number) if isinstance(pieces, Nearby) else range(len(pieces))


class Order:
    """A random order: every piece once per epoch, each epoch in a new order."""

    def __init__(self, pieces: int, seed: int, stream: str) -> None:
        self._pieces = pieces
        self._epoch = lru_cache(maxsize=2)(lambda epoch: Permutation(pieces, seed, f"{stream}/{epoch}"))

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, self._pieces)
        return self._epoch(epoch)[place]


class HeldOutOrder:
    """The order of held-out pieces: the first epoch of one random order, which is that of every run, repeated.

    An evaluation reads the first of them, so they are a choice from all pieces and not the beginning of the corpus.
    """

    def __init__(self, pieces: Sized, stream: str) -> None:
        self._pieces = len(pieces)
        self._order = order_of(pieces, _HELD_OUT_SEED, f"heldout/{stream}")

    def __getitem__(self, number: int) -> int:
        return self._order[number % self._pieces]


def order_of(pieces: Sized, seed: int | None, stream: str) -> PieceOrder:
    """Return a run's order of pieces for the purpose ``stream``; without a seed, the order of held-out pieces."""
    if seed is None:
        return HeldOutOrder(pieces, stream)
    return pieces.order(seed, stream) if isinstance(pieces, Ordered) else Order(len(pieces), seed, stream)


@dataclass(frozen=True)
class Boundaries:
    """The effects of a document's end inside a packed sample.

    Attributes:
        end: The end token, the last token of each document; None if the pieces say where documents begin.
        reset_positions: Positions start at 0 in every document.
        reset_attention: Positions attend only to their own document.
        mask_loss: No loss at end tokens, whose labels belong to the next document.
    """

    end: int | None
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False


class DecoderSamples:
    """Samples for a causal model: ``tokens`` [S] and ``labels`` [S] int64, the labels one position ahead.

    Every label has a weight, fp32: that of its id in the piece, 0 at a document's end if ``boundaries`` says so, and 0
    on padding. A label of weight 0 is NO_LOSS; ``weights`` [S] are in the sample only if another one is not 1.
    A piece shorter than S + 1 is padded, its tokens with id 0 and its labels with NO_LOSS, and only then has the sample
    ``valid`` [S] bool. ``boundaries`` may add int64 ``positions`` [S] and ``ends`` [documents], the position after each
    document of the sample; the last one is S.
    """

    def __init__(
        self, pieces: TokenPieces, seq_length: int, seed: int | None, boundaries: Boundaries | None = None
    ) -> None:
        """Make samples from pieces.

        Args:
            pieces: Pieces of at most S + 1 ids.
            seed: Seed of the order; None for the fixed order of held-out pieces.
        """
        self._pieces = pieces
        self._seq_length = seq_length
        self._order = order_of(pieces, seed, "windows")
        self._boundaries = boundaries

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Sample:
        ids, weights, starts = weighted(self._pieces, self._order[number])
        short = self._seq_length + 1 - len(ids)
        sample = {"tokens": ids[:-1], "labels": ids[1:]}
        if weights is not None:
            sample[WEIGHTS] = weights[1:]
        if self._boundaries is not None:
            sample = self._bounded(sample, self._boundaries, starts)
        if WEIGHTS in sample:
            sample = _weighed(sample)
        if short:
            sample["tokens"] = np.pad(sample["tokens"], (0, short))
            sample["labels"] = np.pad(sample["labels"], (0, short), constant_values=NO_LOSS)
            if WEIGHTS in sample:
                sample[WEIGHTS] = np.pad(sample[WEIGHTS], (0, short))
            sample["valid"] = np.arange(self._seq_length) < len(ids) - 1
        return sample

    def _bounded(self, sample: Sample, boundaries: Boundaries, starts: np.ndarray | None) -> Sample:
        tokens = sample["tokens"]
        at_end = tokens == boundaries.end
        starts = np.flatnonzero(at_end) + 1 if starts is None else starts[1:]  # of documents after the first one
        starts = starts[starts < len(tokens)]
        if boundaries.mask_loss:
            sample[WEIGHTS] = np.where(at_end, np.float32(0), sample.get(WEIGHTS, np.float32(1)))
        if boundaries.reset_positions:
            positions = np.arange(self._seq_length, dtype=np.int64)
            begun = np.zeros(self._seq_length, dtype=np.int64)
            begun[starts] = starts
            sample["positions"] = positions - np.maximum.accumulate(begun)
        if boundaries.reset_attention:
            sample["ends"] = np.append(starts, self._seq_length)
        return sample


def _weighed(sample: Sample) -> Sample:
    """Return the sample with NO_LOSS at weights of 0, and with its weights only if the labels do not say them."""
    counted = sample[WEIGHTS] > 0
    sample["labels"] = np.where(counted, sample["labels"], NO_LOSS)
    if (sample[WEIGHTS] == counted).all():
        del sample[WEIGHTS]
    return sample


PIECES = 1 << 20


class RandomPieces:
    """Pieces of random ids; both ids and lengths are distributed uniformly."""

    def __init__(
        self, ids: np.ndarray, shortest: int, longest: int, seed: int, stream: str, *, end: int | None = None
    ) -> None:
        """Take the ids and the limits of a length; ``stream`` separates training from held-out pieces.

        With ``end``, an end token replaces each position with probability min(1/4, 4 / length).
        """
        self._ids = ids
        self._shortest = shortest
        self._longest = longest
        self._seed = seed
        self._stream = f"mock/{stream}"
        self._end = end

    def __len__(self) -> int:
        return PIECES

    def document(self, number: int) -> int:
        """Return the piece's number, because every piece is a document."""
        return number

    def __getitem__(self, number: int) -> np.ndarray:
        draws = Draws(self._seed, self._stream, number)
        length = self._shortest + draws.integer(self._longest - self._shortest + 1)
        ids = np.asarray(self._ids[draws.integers(length, len(self._ids))])
        return ids if self._end is None else np.where(draws.uniform(length) < min(0.25, 4 / length), self._end, ids)
