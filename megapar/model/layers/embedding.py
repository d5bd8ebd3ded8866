"""Embeddings, the first layers of the models.

Shape letters: B batch, S sequence, H hidden, V vocabulary, P positions; /mp marks dims that are split over the tensor
parallel axis (S only under sequence parallelism).

Tested in ``tests/model/test_models.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import own_piece
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.random import Streams
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import Embedding, LayerOptions, VocabularyEmbedding
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.layers.norm import LayerNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DecoderEmbedding(nn.Module):
    """Vocab parallel word embedding, plus position embedding if positions are learned.

    tokens [B, S] -> word [V/mp, H]: vocabulary embedding -> [B, S(/mp), H] * multiplier + position [P, H][positions]
      -> dropout
    Under sequence parallelism a rank looks up only its own positions, so their gradient is a partial sum over mp.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        cp: ContextParallel,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        self.dropout, self.multiplier = sizes.hidden_dropout, sizes.embedding_multiplier
        self.stream = cp.share(self.mp, sequence_parallel=self.sequence_parallel).rank
        H, dtype, device = sizes.hidden_size, options["dtype"], options["device"]
        self.word = VocabularyEmbedding(sizes.vocab_size, H, **options)
        learned = sizes.position_embedding_type == "learned"
        rows = sizes.max_position_embeddings
        self.position = Embedding(rows, H, dtype=dtype, device=device) if learned else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return [B, S(/mp), H] for tokens and positions, [B, S] int64 each."""
        x = self.word(tokens)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position is not None:
            x = x + self.position(own_sequence(positions, self.mp, self.sequence_parallel))
        return drop(x, self.dropout if self.training else 0.0, self.stream)


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


class ErnieEmbedding(nn.Module):
    """Sum of word, position, token type and task type embeddings, then layer norm and dropout.

    tokens [B, S] -> word [V/mp, H]: vocabulary embedding -> [B, S(/mp), H] + position + token_type + task_type
      -> layer norm -> dropout
    Under sequence parallelism the gradients of the norm and of all embeddings except word's are partial sums over mp.

    Attributes:
        share: Factor on the dropout probability, for dropout that grows during training.
    """

    def __init__(
        self,
        sizes: ErnieSizes,
        *,
        cp: ContextParallel,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        self.dropout = sizes.hidden_dropout
        self.stream = cp.share(self.mp, sequence_parallel=self.sequence_parallel).rank
        H, dtype, device = sizes.hidden_size, options["dtype"], options["device"]
        self.word = VocabularyEmbedding(sizes.vocab_size, H, **options)
        self.position = Embedding(sizes.max_position_embeddings, H, dtype=dtype, device=device)
        self.token_type = Embedding(sizes.type_vocab_size, H, dtype=dtype, device=device)
        self.task_type = Embedding(sizes.task_type_vocab_size, H, dtype=dtype, device=device)
        run = options.get("execution", DEFAULT).run
        self.norm = LayerNorm(H, sizes.layernorm_epsilon, dtype=dtype, device=device, run=run)
        self.share = 1.0

    def forward(self, tokens: Tensor, token_types: Tensor, task_types: Tensor, positions: Tensor) -> Tensor:
        """Return [B, S(/mp), H] for arguments [B, S] int64 each."""
        indices = (own_sequence(t, self.mp, self.sequence_parallel) for t in (token_types, positions, task_types))
        token_type, position, task_type = indices
        x = self.word(tokens) + self.token_type(token_type) + self.position(position) + self.task_type(task_type)
        dropout = self.dropout * self.share if self.training else 0.0
        return drop(self.norm(x), dropout, self.stream)


def drop(x: Tensor, probability: float, rank: int) -> Tensor:
    """Apply dropout to the embedding's output [B, S(/mp), H].

    Args:
        x: The output.
        probability: Dropout probability.
        rank: Number of this rank among those that hold other positions.
    """
    return Streams.current().dropout(x, probability, "embedding", rank)


def own_sequence(x: Tensor, mp: Axis, sequence_parallel: bool) -> Tensor:
    """Return the positions of x [B, S] that this rank's activations hold: [B, S/mp] under sequence parallelism."""
    return own_piece(x, mp, SEQUENCE_DIM) if sequence_parallel else x
