"""The embedding of an ERNIE encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.context_parallel.method import ContextParallel
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import Embedding, LayerOptions, VocabularyEmbedding
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.layers.embedding import drop, own_sequence
from megapar.model.layers.norm import LayerNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
