"""Objectives on knowledge: masked phrases and entities, and triples with a sentence that expresses them.

Items of both: masked tokens. Metric: their cross-entropy. Source: ERNIE 3.0 (arXiv 2107.02137).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megapar.data.lazy_numpy import np
from megapar.data.sampling.draws import Draws
from megapar.data.sampling.ernie import Frame, mask_words
from megapar.data.sampling.samples import NO_LOSS, Sample, TokenPieces
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.errors import DataError
from megapar.model.ernie3.sizes import KNOWLEDGE_MLM, KNOWLEDGE_TEXT


class Lexicon:
    """Phrases and entities as sequences of ids, matched in one pass (Aho and Corasick 1975, by pyahocorasick)."""

    def __init__(self, entries: Iterable[tuple[int, ...]]) -> None:
        """Add the entries of at least two ids; a single id is already a word."""
        self._automaton: Any = ()
        if words := [entry for entry in entries if len(entry) > 1]:
            import ahocorasick  # of an extra, which only runs with a lexicon need

            self._automaton = ahocorasick.Automaton(ahocorasick.STORE_LENGTH, ahocorasick.KEY_SEQUENCE)
            for entry in words:
                self._automaton.add_word(entry)
            self._automaton.make_automaton()

    @classmethod
    def read(cls, paths: Iterable[str | Path], tokenizer: Tokenizer) -> Lexicon:
        """Read files with one entry per line. Raises DataError if a file cannot be read or is empty."""
        texts: list[str] = []
        for path in paths:
            try:
                lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").split("\n")]
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path} cannot be read: {error}") from error
            if not any(lines):
                raise DataError(f"{path} contains no entries; it takes one per line")
            texts += [line for line in lines if line]
        return cls(map(tuple, tokenizer.encode_batch(texts)))

    def __len__(self) -> int:
        """Return the number of entries of at least two ids."""
        return len(self._automaton)

    def spans(self, ids: np.ndarray, starts: np.ndarray) -> list[tuple[int, int]]:
        """Return [start, end) of the entries in ids [T], in order and without overlap.

        Entries begin and end at word boundaries. Among overlapping ones the longest wins, then the leftmost.
        ``starts`` [T] bool is True at the first id of each word.
        """
        if not len(self._automaton):
            return []
        matches = [(end + 1 - length, end + 1) for end, length in self._automaton.iter(tuple(ids.tolist()))]
        whole = [(a, b) for a, b in matches if starts[a] and (b == len(ids) or starts[b])]
        taken: list[tuple[int, int]] = []
        for a, b in sorted(whole, key=lambda span: (span[0] - span[1], span[0])):
            if all(b <= other[0] or a >= other[1] for other in taken):
                taken.append((a, b))
        return sorted(taken)

    def unit_starts(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return [T] bool, True at the first id of every unit: of each entry, and of each word outside entries."""
        units: np.ndarray = starts.copy()
        for a, b in self.spans(ids, starts):
            units[a + 1 : b] = False
        return units


@dataclass(frozen=True)
class KnowledgeMlm:
    """Knowledge-masked language model: words, phrases and named entities are masked whole and predicted.

    Pieces have at most S - 2 ids. ``probability`` is that of a unit to be masked. Source: section 3.2.1.
    """

    pieces: TokenPieces
    frame: Frame
    lexicon: Lexicon
    probability: float
    name: str = KNOWLEDGE_MLM

    def make(self, number: int, draws: Draws) -> Sample:
        """Return a piece whose chosen units are masked, replaced or kept (80 / 10 / 10)."""
        ids, frame = self.pieces[number], self.frame
        units = self.lexicon.unit_starts(ids, frame.marks.word_starts(ids))
        return frame.sample(mask_words(ids, units, self.probability, frame.mask, frame.ordinary, draws))


class Triple(NamedTuple):
    """The ids of a triple's three members and of a sentence that expresses it."""

    head: np.ndarray
    relation: np.ndarray
    tail: np.ndarray
    sentence: np.ndarray


class Triples(Protocol):
    """Triples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Triple: ...


@dataclass(frozen=True)
class KnowledgeText:
    """Universal knowledge-text prediction: a triple and a sentence that expresses it; one is predicted from the other.

        [CLS] head relation tail [SEP] sentence [SEP]    the relation is masked whole, or words of the sentence are

    ``probability`` is that of a word of the sentence to be masked. Source: section 3.2.3.
    """

    triples: Triples
    frame: Frame
    probability: float
    name: str = KNOWLEDGE_TEXT

    def make(self, number: int, draws: Draws) -> Sample:
        """Return a sample whose relation or words of the sentence are masked, each with probability 1/2."""
        frame, triple = self.frame, self.triples[number]
        room = frame.pair_room
        known = np.concatenate(triple[:3])[: room // 2]
        sentence = triple.sentence[: room - len(known)]
        if draws.integer(2):
            starts = frame.marks.word_starts(sentence)
            masked = mask_words(sentence, starts, self.probability, frame.mask, frame.ordinary, draws)
            return frame.sample((known, None), masked)
        labels, start = np.full(len(known), NO_LOSS, dtype=np.int64), len(triple.head)
        hidden = slice(start, start + len(triple.relation))
        labels[hidden] = known[hidden]
        shown = known.copy()
        shown[hidden] = frame.mask
        return frame.sample((shown, labels), (sentence, None))


def read_triples(path: str | Path, tokenizer: Tokenizer, split: Split) -> TrainHeldout[Triples]:
    """Read tab-separated HEAD, RELATION, TAIL, SENTENCE, split by hash as documents. Raises DataError with the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # text may contain other separators
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    rows: list[list[str]] = []
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.split("\t")]
        if line.strip() and (len(cells) != 4 or not all(cells)):
            raise DataError(f"{path}, line {number}: {len(cells)} cells instead of HEAD, RELATION, TAIL, SENTENCE")
        if line.strip():
            rows.append(cells)
    ids = tokenizer.encode_batch([cell for cells in rows for cell in cells])
    sides: tuple[list[Triple], list[Triple]] = ([], [])
    for number, cells in enumerate(rows):
        side = split.side("\t".join(cells))
        if side is not None:
            four = (np.array(cell, dtype=np.int64) for cell in ids[4 * number : 4 * number + 4])
            sides[side].append(Triple(*four))
    if not sides[0]:
        raise DataError(f"{path}: none of its {len(rows)} triples is for training; pass more triples")
    return TrainHeldout[Triples](*sides)


@dataclass(frozen=True)
class RandomTriples:
    """Triples of random ids instead of knowledge, with sentences of at most ``longest``, for benchmarks and tests."""

    ids: np.ndarray
    seed: int
    stream: str
    longest: int

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Triple:
        draws = Draws(self.seed, f"triples/{self.stream}", number)

        def random_ids(longest: int) -> np.ndarray:
            return self.ids[draws.integers(1 + draws.integer(longest), len(self.ids))]

        return Triple(random_ids(2), random_ids(2), random_ids(2), random_ids(self.longest))
