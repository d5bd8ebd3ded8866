"""The layers of ERNIE: its embedding, and a post-norm layer of attention and a dense MLP. ERNIE 3.0 builds on them.

Shape letters: B batch, S sequence, H hidden; S is split over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.compiled import plain
from megapar.core.device.layer_ops import in_one_kernel
from megapar.core.device.triton_operators import MOST_NORMED
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import Embedding, LayerOptions, RowLinear, VocabularyEmbedding, local
from megapar.model.attention.self_attention import make_attention
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.layers.context import Context
from megapar.model.layers.embedding import drop, own_sequence
from megapar.model.layers.mlp import Mlp
from megapar.model.layers.norm import LayerNorm
from megapar.model.layers.residual import HiddenDropout
from megapar.moe.stats import MoeStats

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

    def __init__(self, sizes: ErnieSizes, *, cp: ContextParallel, **options: Unpack[LayerOptions]) -> None:
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


class ErnieBlock(nn.Module):
    """Post-norm layer: norm(x + dropout(attention(x))), then norm(x + dropout(mlp(x))).

    x is [B, S(/mp), H] throughout. The norms' gradients are partial sums over mp under sequence parallelism.

    Attributes:
        cut: This rank's activations hold only some positions (sequence parallelism).
    """

    def __init__(self, sizes: ErnieSizes, layer: int, *, cp: ContextParallel, **options: Unpack[LayerOptions]) -> None:
        super().__init__()
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        mp, sequence_parallel = options["mp"], options["sequence_parallel"]
        self.cut = sequence_parallel and mp.size > 1
        share = cp.share(mp, sequence_parallel=sequence_parallel)
        self.drop = HiddenDropout(sizes.hidden_dropout, layer, share.rank)
        H, epsilon = sizes.hidden_size, sizes.layernorm_epsilon
        self.attention = make_attention(sizes.attention, layer, cp=cp, **options)
        self.attention_norm = LayerNorm(H, epsilon, dtype=dtype, device=device, run=run)
        self.mlp = Mlp(H, sizes.ffn_hidden_size, gated=False, bias=True, **options)
        self.mlp_norm = LayerNorm(H, epsilon, dtype=dtype, device=device, run=run)
        for half in ("attention", "mlp"):
            self._output(half).leaves_bias = run is plain and H <= MOST_NORMED

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, MoeStats | None]:
        """Return [B, S(/mp), H] for x [B, S(/mp), H], and None: the layer has no routing statistics."""
        x = self.add(x, self.attention(x, context), context)
        return self.add(x, self.mlp(x), context, "mlp"), None

    def add(self, x: Tensor, y: Tensor, context: Context, half: str = "attention", place: str = "") -> Tensor:
        """Return norm(x + dropout(y)), [B, S(/mp), H], for a half's output y. place: Suffix of the dropout's stream."""
        norm, layer = self.mlp_norm if half == "mlp" else self.attention_norm, self._output(half)
        if layer.bias is None or not (layer.leaves_bias and in_one_kernel(y)):
            return norm.after(x, self.drop(y, context, half + place))[1]
        drop, stream = self.drop, context.place(f"layers.{self.drop.layer}.{half}{place}", 0)
        dropped = drop.probability * drop.share if self.training else 0.0
        with context.streams.drawing(y.device, stream, drop.rank) if dropped else nullcontext():
            return norm(x, y, local(layer.bias), dropped)

    def _output(self, half: str) -> RowLinear:
        layer = self.mlp.down if half == "mlp" else self.attention.get_submodule("proj")
        assert isinstance(layer, RowLinear)
        return layer
