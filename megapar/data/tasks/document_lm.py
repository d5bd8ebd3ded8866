"""Document language model: every next token of a piece, left to right, in the generation branch.

Items: predicted tokens. Metric: their cross-entropy. Source: ERNIE 3.0 (arXiv 2107.02137), section 3.2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapar.data.sampling.draws import Draws
from megapar.data.sampling.frame import Frame
from megapar.data.sampling.samples import NO_LOSS, Sample, TokenPieces
from megapar.model.ernie3.tasks import DOCUMENT_LM


@dataclass(frozen=True)
class DocumentLm:
    """Samples of the document language model.

    Attributes:
        pieces: Pieces of at most S - 2 ids.
        frame: The form of the samples.
        name: Name of the task.
    """

    pieces: TokenPieces
    frame: Frame
    name: str = DOCUMENT_LM

    def make(self, number: int, draws: Draws) -> Sample:
        """Return [CLS] a b c [SEP] with the labels a b c [SEP] and, at the last position, NO_LOSS."""
        ids = self.pieces[number]
        sample = self.frame.sample((ids, None))
        sample["labels"][: len(ids) + 1] = sample["tokens"][1 : len(ids) + 2]
        sample["labels"][len(ids) + 1 :] = NO_LOSS
        return sample
