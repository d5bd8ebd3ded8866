"""Universal knowledge-text prediction: a triple and a sentence that says it; one is predicted from the other.

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
    """Ids of a triple's three members, and of a sentence that says it."""

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
    """triples: in the order of the run. probability: of a word of the sentence to be masked."""

    triples: Triples
    frame: Frame
    probability: float
    name: str = KNOWLEDGE_TEXT

    def make(self, number: int, draws: Draws) -> Sample:
        """Masks the relation, or words of the sentence, one as often as the other."""
        import numpy as np

        frame, triple = self.frame, self.triples[number]
        room = frame.pair_room
        known = np.concatenate(triple[:3])[: room // 2]
        sentence = triple.sentence[: room - len(known)]
        if draws.integer(2):
            starts = frame.marks.word_starts(sentence)
            masked = mask_words(sentence, starts, self.probability, frame.mask, frame.ordinary, draws)
            return frame.sample((known, None), masked)
        asked, start = np.full(len(known), NO_LOSS, dtype=np.int64), len(triple.head)
        hidden = slice(start, start + len(triple.relation))
        asked[hidden] = known[hidden]
        shown = known.copy()
        shown[hidden] = frame.mask
        return frame.sample((shown, asked), (sentence, None))


def read_triples(path: str | Path, tokenizer: Tokenizer, split: Split) -> TrainHeldout[Triples]:
    """Reads lines HEAD, RELATION, TAIL, SENTENCE with tabs between them.

    Lines are split by their hash, as documents are. Raises DataError, naming the line.
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
            raise DataError(f"{path}, line {number}: {len(cells)} cells, where HEAD, RELATION, TAIL, SENTENCE belong")
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
        raise DataError(f"{path}: of {len(rows)} triples none is to train on")
    return TrainHeldout[Triples](*sides)


@dataclass(frozen=True)
class RandomTriples:
    """Random ids instead of knowledge, for benchmarks and tests. ids: to draw from."""

    ids: np.ndarray
    seed: int
    stream: str
    longest: int

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Triple:
        draws = Draws(self.seed, f"triples/{self.stream}", number)

        def some(most: int) -> np.ndarray:
            drawn: np.ndarray = self.ids[draws.integers(1 + draws.integer(most), len(self.ids))]
            return drawn

        return Triple(some(2), some(2), some(2), some(self.longest))
