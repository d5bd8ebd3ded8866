"""ERNIE's samples: two consecutive pieces of a document, with whole-word masking and sentence order prediction."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.data.lazy_numpy import np
from megapar.data.sampling.counts import PieceCounts
from megapar.data.sampling.draws import Draws
from megapar.data.sampling.samples import NO_LOSS, Sample, TokenPieces, order_of
from megapar.data.tokenizers.tokenizer import Tokenizer, WordMarks
from megapar.data.tokens.store import TokenStore
from megapar.errors import DataError

PAIR_MARKS = 3  # [CLS], [SEP], [SEP]


@dataclass(frozen=True)
class Frame:
    """The form of samples of S positions, common to all objectives.

        [CLS] part .. [SEP] part .. [SEP] pad ..        token types 0, 1, 1, ..; positions from 0

    Attributes:
        ordinary: ids for random replacements.
        marks: Word boundaries of the tokenizer.
    """

    seq_length: int
    cls: int
    sep: int
    pad: int
    mask: int
    ordinary: np.ndarray
    marks: WordMarks

    @classmethod
    def of(cls, tokenizer: Tokenizer, seq_length: int) -> Frame:
        """Return the frame of a tokenizer. Raises DataError if it lacks one of [CLS], [SEP], [MASK], [PAD]."""
        need = tokenizer.special.need
        ids = (need("cls"), need("sep"), need("pad"), need("mask"))
        return cls(seq_length, *ids, tokenizer.ordinary_ids, tokenizer.word_marks)

    @property
    def pair_room(self) -> int:
        """Maximum number of ids of two parts together."""
        return self.seq_length - PAIR_MARKS

    def sample(self, *parts: tuple[np.ndarray, np.ndarray | None], label: int = NO_LOSS) -> Sample:
        """Return a sample: tokens, token_types, labels [S] int64, valid [S] bool, label [] int64.

        Args:
            parts: (input ids, labels) of each part; labels are None if no id of the part is predicted.
            label: Class of the sample; NO_LOSS if it has none.
        """
        tokens = np.full(self.seq_length, self.pad, dtype=np.int64)
        labels = np.full(self.seq_length, NO_LOSS, dtype=np.int64)
        types = np.zeros(self.seq_length, dtype=np.int64)
        tokens[0], end = self.cls, 1
        for kind, (shown, part_labels) in enumerate(parts):
            start, end = end, end + len(shown)
            tokens[start:end], tokens[end] = shown, self.sep
            if part_labels is not None:
                labels[start:end] = part_labels
            end += 1
            types[start:end] = min(kind, 1)
        valid = np.arange(self.seq_length) < end
        return {
            "tokens": tokens,
            "token_types": types,
            "labels": labels,
            "valid": valid,
            "label": np.array(label, dtype=np.int64),
        }


SHORTEST_SEQUENCE = PAIR_MARKS + 3  # positions; for this length every span has the two ids that a pair needs
SHORTEST_SPAN = 8  # ids; shorter spans do not contain two meaningful sentences
MASKED, RANDOM = 0.8, 0.1  # shares of the chosen words that become [MASK], or random ids; the rest stays


class Spans:
    """The documents of a store, each cut into the fewest spans of at most ``longest`` ids, of nearly equal length.

    Spans never cross documents. Documents with fewer than SHORTEST_SPAN ids are not used. Raises DataError if no span
    remains.
    """

    def __init__(self, store: TokenStore, longest: int) -> None:
        self._store = store
        self._counts = PieceCounts(store.offsets, lambda lengths: span_counts(lengths - 1, longest))  # no end token
        if len(self) == 0:
            raise DataError(f"no document of the corpus has the {SHORTEST_SPAN} tokens that a sentence pair needs")

    def __len__(self) -> int:
        return self._counts.total

    def document(self, number: int) -> int:
        """Return the number of the document that a span is from."""
        return self._counts.find(number)[0]

    def __getitem__(self, number: int) -> np.ndarray:
        document, part, parts = self._counts.find(number)
        start, end = (int(n) for n in self._store.offsets[document : document + 2])
        length = end - 1 - start
        return np.asarray(
            self._store.tokens[start + length * part // parts : start + length * (part + 1) // parts], dtype=np.int64
        )


def span_counts(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return [n] spans per document for ``lengths`` [n], ids per document."""
    return np.where(lengths >= SHORTEST_SPAN, -(-lengths // longest), 0)


class ErnieSamples:
    """Samples for ERNIE's pre-training, as dicts of int64 arrays:

        [CLS] A .. A [SEP] B .. B [SEP] pad .. pad
          0   0 .. 0   0   1 .. 1   1    0  ..  0     token_types
        with A before B in the document (order 0) or the same two swapped (order 1)

    The samples have the form of ``Frame``, and their label is the order.
    Sample ``number`` depends only on (seed, number).
    """

    def __init__(
        self, pieces: TokenPieces, seq_length: int, tokenizer: Tokenizer, mlm_probability: float, seed: int | None
    ) -> None:
        """Make samples from pieces. Raises DataError if the tokenizer lacks one of [CLS], [SEP], [MASK], [PAD].

        Args:
            pieces: Pieces of 2 to S - 3 ids.
            seed: Seed of the order, the cuts and the masks; None for the fixed held-out samples.
        """
        self._frame = Frame.of(tokenizer, seq_length)
        self._pieces = pieces
        self._probability = mlm_probability
        self._seed = seed
        self._order = order_of(pieces, seed, "spans")

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Sample:
        piece, frame = self._order[number], self._frame
        ids = self._pieces[piece]
        draws = Draws(0, "heldout", piece) if self._seed is None else Draws(self._seed, "ernie", number)
        starts = frame.marks.word_starts(ids)
        cut = cut_at(starts, draws.uniform(1)[0])
        swapped = draws.integer(2)
        shown, labels = mask_words(ids, starts, self._probability, frame.mask, frame.ordinary, draws)
        halves = (slice(cut, None), slice(0, cut)) if swapped else (slice(0, cut), slice(cut, None))
        return frame.sample(*((shown[half], labels[half]) for half in halves), label=swapped)


def cut_at(starts: np.ndarray, where: float) -> int:
    """Return the index in [1, T) at which T ids are cut in two: a word start in the middle half if it has one.

    Args:
        starts: [T] bool, True at the first id of each word, T >= 2.
        where: Selects one of the candidates, in [0, 1).
    """
    length = len(starts)
    low, high = max(1, length // 4), max(2, length - length // 4)
    places = np.flatnonzero(starts[low:high]) + low
    if len(places) == 0:
        places = np.arange(low, min(high, length))
    return int(places[int(where * len(places))])


def mask_words(
    ids: np.ndarray, starts: np.ndarray, probability: float, mask: int, ordinary: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray]:
    """Mask whole words; return the input ids [T] and the labels [T], which are NO_LOSS for words that are not chosen.

    Every word is chosen with ``probability``, and always at least one. Of the chosen words 80 % become [MASK], 10 %
    random ordinary ids, and 10 % stay unchanged. All ids of a word are treated alike, as in ERNIE's knowledge masking.

    Args:
        ids: [T], the ids of a piece.
        starts: [T] bool, True at the first id of each word; the first one is True.
        probability: Probability that a word is chosen.
        mask: id of [MASK].
        ordinary: ids for random replacements.
        draws: Random numbers of the sample.
    """
    words = int(starts.sum())
    chosen = draws.uniform(words) < probability
    chosen[draws.integer(words)] |= not chosen.any()
    fate = draws.uniform(words)
    word = np.cumsum(starts) - 1  # [T]: the word of each id
    predicted, fate = chosen[word], fate[word]
    random = ordinary[draws.integers(len(ids), len(ordinary))]
    shown = np.where(predicted & (fate < MASKED), mask, ids)
    shown = np.where(predicted & (fate >= MASKED) & (fate < MASKED + RANDOM), random, shown)
    return shown, np.where(predicted, ids, NO_LOSS)
