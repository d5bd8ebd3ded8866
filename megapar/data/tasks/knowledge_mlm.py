"""Knowledge-masked language model: words, phrases and named entities are masked whole and predicted.

Items: masked tokens. Metric: their cross-entropy. Source: ERNIE 3.0 (arXiv 2107.02137), section 3.2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.ernie import mask_words
from megapar.data.sampling.frame import Frame
from megapar.data.sampling.samples import Sample, TokenPieces
from megapar.data.tasks.lexicon import Lexicon
from megapar.model.ernie3.tasks import KNOWLEDGE_MLM


@dataclass(frozen=True)
class KnowledgeMlm:
    """Samples of the knowledge-masked language model.

    Attributes:
        pieces: Pieces of at most S - 2 ids.
        frame: The form of the samples.
        lexicon: Phrases and entities that are units in addition to words.
        probability: Probability that a unit is masked.
        name: Name of the task.
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
