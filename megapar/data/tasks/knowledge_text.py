"""Universal knowledge-text prediction: a triple and a sentence that expresses it; one is predicted from the other.

    [CLS] head relation tail [SEP] sentence [SEP]     the relation is masked whole, or words of the sentence are

Items: masked tokens. Metric: their cross-entropy. Source: ERNIE 3.0 (arXiv 2107.02137), section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.ernie import mask_words
from megapar.data.sampling.frame import Frame
from megapar.data.sampling.samples import NO_LOSS, Sample
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.errors import DataError
from megapar.model.ernie3.tasks import KNOWLEDGE_TEXT

if TYPE_CHECKING:
    import numpy as np


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
    """Samples of knowledge-text prediction.

    Attributes:
        triples: Triples, in the order of the run.
        frame: The form of the samples.
        probability: Probability that a word of the sentence is masked.
        name: Name of the task.
    """

    triples: Triples
    frame: Frame
    probability: float
    name: str = KNOWLEDGE_TEXT

    def make(self, number: int, draws: Draws) -> Sample:
        """Return a sample whose relation or words of the sentence are masked, each with probability 1/2."""
        import numpy as np

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
    """Read lines of tab-separated HEAD, RELATION, TAIL, SENTENCE.

    Lines are split by their hash, as documents are. Raises DataError with the number of the first broken line.
    """
    import numpy as np

    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
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
    """Triples of random ids instead of knowledge, for benchmarks and tests.

    Attributes:
        ids: ids to draw from.
        seed: Seed of the ids.
        stream: Separates training from held-out triples.
        longest: Maximum length of a sentence, in ids.
    """

    ids: np.ndarray
    seed: int
    stream: str
    longest: int

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Triple:
        draws = Draws(self.seed, f"triples/{self.stream}", number)

        def random_ids(longest: int) -> np.ndarray:
            drawn: np.ndarray = self.ids[draws.integers(1 + draws.integer(longest), len(self.ids))]
            return drawn

        return Triple(random_ids(2), random_ids(2), random_ids(2), random_ids(self.longest))
