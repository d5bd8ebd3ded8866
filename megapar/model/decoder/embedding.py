"""The embedding of a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.context_parallel.method import ContextParallel
from megapar.core.tensor_parallel.layers import Embedding, LayerOptions, VocabularyEmbedding
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.layers.embedding import drop, own_sequence

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
