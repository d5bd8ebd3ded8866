"""ERNIE's samples: two consecutive pieces of a document, whole words masked, sentence order to be predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapar.data.sampling.counts import PieceCounts
from megapar.data.sampling.draws import Draws
from megapar.data.sampling.frame import PAIR_MARKS, Frame
from megapar.data.sampling.samples import NO_LOSS, Sample, TokenPieces, order_of
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.store import TokenStore
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

SHORTEST_SEQUENCE = PAIR_MARKS + 3  # positions; then no span is shorter than the two ids that a pair needs
SHORTEST_SPAN = 8  # ids; shorter ones have no two sentences worth telling apart
MASKED, RANDOM = 0.8, 0.1  # shares of the chosen words that become [MASK], or random ids; the others stay


class Spans:
    """The documents of a store, each cut in as few spans of at most ``longest`` ids as it takes, near equal.

    Spans never reach across documents. Of documents with fewer than SHORTEST_SPAN ids nothing is used.
    Raises DataError where nothing is left.
    """

    def __init__(self, store: TokenStore, longest: int) -> None:
        self._store = store
        self._counts = PieceCounts(store.offsets, lambda lengths: span_counts(lengths - 1, longest))  # no end token
        if len(self) == 0:
            raise DataError(f"no document of the corpus has the {SHORTEST_SPAN} tokens a sentence pair needs")

    def __len__(self) -> int:
        return self._counts.total

    def document(self, number: int) -> int:
        """The number of the document that a span is from."""
        return self._counts.find(number)[0]

    def __getitem__(self, number: int) -> np.ndarray:
        import numpy as np

        document, part, parts = self._counts.find(number)
        start, end = (int(n) for n in self._store.offsets[document : document + 2])
        length = end - 1 - start
        return np.asarray(
            self._store.tokens[start + length * part // parts : start + length * (part + 1) // parts],
            dtype=np.int64,
        )


def span_counts(lengths: np.ndarray, longest: int) -> np.ndarray:
    """[n] ids per document to spans per document."""
    import numpy as np

    return np.where(lengths >= SHORTEST_SPAN, -(-lengths // longest), 0)


class ErnieSamples:
    """Samples for ERNIE's pre-training, as dicts of int64 arrays:

        [CLS] A .. A [SEP] B .. B [SEP] pad .. pad
          0   0 .. 0   0   1 .. 1   1    0  ..  0     token_types
        with A before B in the document (order 0) or the same two swapped (order 1)

    A ``Frame``'s samples; their label is the order.
    Sample ``number`` depends on (seed, number) and nothing else.
    """

    def __init__(
        self, pieces: TokenPieces, seq_length: int, tokenizer: Tokenizer, mlm_probability: float, seed: int | None
    ) -> None:
        """pieces: of 2 to S - 3 ids. seed: of the order, the cuts and the masks; None: the fixed held-out ones.

        Raises DataError where the tokenizer lacks one of [CLS], [SEP], [MASK], [PAD].
        """
        self._frame = Frame.of(tokenizer, seq_length)
        self._pieces = pieces
        self._probability = mlm_probability
        self._seed = seed
        self._order = order_of(pieces, seed, "spans")

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> Sample:
        if self._seed is None:
            number %= len(self._pieces)
        ids, frame = self._pieces[self._order[number]], self._frame
        draws = Draws(0, "heldout", number) if self._seed is None else Draws(self._seed, "ernie", number)
        starts = frame.marks.word_starts(ids)
        cut = cut_at(starts, draws.uniform(1)[0])
        swapped = draws.integer(2)
        shown, labels = mask_words(ids, starts, self._probability, frame.mask, frame.ordinary, draws)
        halves = (slice(cut, None), slice(0, cut)) if swapped else (slice(0, cut), slice(cut, None))
        return frame.sample(*((shown[half], labels[half]) for half in halves), label=swapped)


def cut_at(starts: np.ndarray, where: float) -> int:
    """A place in [1, T) to cut T ids in two, a word start in the middle half where there is one.

    starts: [T] bool, T >= 2. where: in [0, 1), which of the places it is.
    """
    import numpy as np

    length = len(starts)
    low, high = max(1, length // 4), max(2, length - length // 4)
    places = np.flatnonzero(starts[low:high]) + low
    if len(places) == 0:
        places = np.arange(low, min(high, length))
    return int(places[int(where * len(places))])


def mask_words(
    ids: np.ndarray, starts: np.ndarray, probability: float, mask: int, ordinary: np.ndarray, draws: Draws
) -> tuple[np.ndarray, np.ndarray]:
    """Whole-word masking: (what the model is shown [T], labels [T] with NO_LOSS where nothing is predicted).

    Every word is chosen with ``probability``, at least one always. Of the chosen words 80 % become [MASK],
    10 % random ordinary ids, 10 % stay as they are; a word shares one fate, as in ERNIE's knowledge masking.
    ids: [T]. starts: [T] bool, the first of them true. ordinary: ids a random replacement may be.
    """
    import numpy as np

    words = int(starts.sum())
    chosen = draws.uniform(words) < probability
    chosen[draws.integer(words)] |= not chosen.any()
    fate = draws.uniform(words)
    word = np.cumsum(starts) - 1  # [T]: which word each id belongs to
    asked, fate = chosen[word], fate[word]
    random = ordinary[draws.integers(len(ids), len(ordinary))]
    shown = np.where(asked & (fate < MASKED), mask, ids)
    shown = np.where(asked & (fate >= MASKED) & (fate < MASKED + RANDOM), random, shown)
    return shown, np.where(asked, ids, NO_LOSS)
