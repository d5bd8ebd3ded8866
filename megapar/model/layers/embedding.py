"""Embeddings, the first layers of the models.

Shape letters: B batch, S sequence, H hidden, V vocabulary, P positions; /mp marks dims that are split over the tensor
parallel axis (S only under sequence parallelism).
"""

from __future__ import annotations

from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import own_piece
from megapar.core.random import Streams
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.core.tensor_parallel.layers import VocabularyEmbedding


class TiedWord(nn.Module):
    """Word embedding on the last stage of a pipeline, where only the head uses it. The first stage has a copy, too.

    word [V/mp, H]: The same values on both stages. Their gradients are summed once per step.
    """

    def __init__(self, word: VocabularyEmbedding) -> None:
        super().__init__()
        self.word = word

    def forward(self, *_: Tensor) -> Tensor:
        """Raise RuntimeError, because the first stage embeds the tokens."""
        raise RuntimeError("the last stage of a pipeline has the word embedding for its head only")


def drop(x: Tensor, probability: float, rank: int) -> Tensor:
    """Apply dropout to the embedding's output [B, S(/mp), H]. rank: number among ranks with other positions."""
    return Streams.current().dropout(x, probability, "embedding", rank)


def own_sequence(x: Tensor, mp: Axis, sequence_parallel: bool) -> Tensor:
    """Return the positions of x [B, S] that this rank's activations hold: [B, S/mp] under sequence parallelism."""
    return own_piece(x, mp, SEQUENCE_DIM) if sequence_parallel else x
