"""Self-attention with grouped queries, on a fused query-key-value weight with a real group axis.

Shape letters: B batch, S sequence (under context parallelism, this rank's share of it), H hidden, G groups (key-value
heads), Q query heads per group, N query heads, D head size; /mp marks what is cut over the tensor parallel axis.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.compiled import counted
from megapar.core.context_parallel.blockwise import Work, attend_blockwise
from megapar.core.context_parallel.heads import to_heads, to_positions
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.ops import attention_reference, op
from megapar.core.device.packed import packed_attention_reference
from megapar.core.execution import DEFAULT
from megapar.core.selective import again
from megapar.core.tensor_parallel import ColumnLinear, LayerOptions, RowLinear, local
from megapar.model.layers.context import Context
from megapar.model.layers.norm import RmsNorm, rms_norm
from megapar.model.layers.rotary import rotate

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class AttentionSizes:
    """The numbers of one attention layer; ``flash``: fused kernels, off means the math reference."""

    hidden_size: int
    num_groups: int
    queries_per_group: int
    head_dim: int
    causal: bool
    bias: bool
    qk_norm: bool
    epsilon: float
    dropout: float
    flash: bool


class Attention(nn.Module):
    """Attention over the whole sequence of each sample, heads cut over mp by group.

    x [B, S(/mp), H] -> qkv: column linear -> [B, S, G/mp, Q + 2, D] -> (norm, rope) -> softmax(q k^T) v
      -> [B, S, G Q D/mp] -> proj: row linear -> y [B, S(/mp), H]
    Under context parallelism softmax(q k^T) v reaches all positions, as ``core.context_parallel`` has it.
    Backward mirrors it; q_norm and k_norm [D] see only this rank's heads: their gradients are partial over mp.
    """

    def __init__(
        self,
        sizes: AttentionSizes,
        layer: int,
        *,
        cp: ContextParallel | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        mp, dtype, device = options["mp"], options["dtype"], options["device"]
        self.sizes, self.mp, self.cp = sizes, mp, cp or ContextParallel()
        # Each mp rank has other heads, each cp rank other positions or heads.
        self.stream = self.cp.axis.rank * mp.size + mp.rank
        self.dropout = sizes.dropout  # on the weights
        execution = options.get("execution", DEFAULT)
        self.run, self.selective = execution.run, execution.selective
        self.place = f"layers.{layer}.attention.weights"
        G, Q, D = sizes.num_groups, sizes.queries_per_group, sizes.head_dim
        self.qkv = ColumnLinear(
            sizes.hidden_size,
            (G, Q + 2, D),
            split=0,
            bias=sizes.bias,
            **options,
        )
        self.proj = RowLinear(
            G * Q * D,
            sizes.hidden_size,
            bias=sizes.bias,
            **options,
        )
        self.q_norm = RmsNorm(D, sizes.epsilon, dtype=dtype, device=device, run=self.run) if sizes.qk_norm else None
        self.k_norm = RmsNorm(D, sizes.epsilon, dtype=dtype, device=device, run=self.run) if sizes.qk_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S(/mp), H] to [B, S(/mp), H]."""
        q, k, v = self.heads(x, context.angles)
        if self.cp.deals_heads:
            q, k, v = to_heads(q, k, v, self.cp.axis, self.cp.traffic)
        # Blocks of keys that other ranks send are not kept anyway; to compute again would be to send them again.
        selective = self.selective and context.plan is None
        y = again(self._attend, q, k, v, context) if selective else self._attend(q, k, v, context)
        if self.cp.deals_heads:
            y = to_positions(y, self.cp.axis, self.cp.traffic)
        out: Tensor = self.proj(y.flatten(2))
        return out

    def heads(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S(/mp), H] to q [B, S, N, D], k and v [B, S, G, D]; angles: those of these positions."""
        return self.parted(self.qkv(x), angles)

    def parted(self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, G, Q + 2, D] to q [B, S, N, D], k and v [B, S, G, D], normed and turned."""
        if self.q_norm is None and angles is None:
            return split_heads(qkv)  # views
        weights = [None if norm is None else local(norm.weight) for norm in (self.q_norm, self.k_norm)]
        return self.run(turned_heads, qkv, *weights, self.sizes.epsilon, *(angles or (None, None)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, S, N, D], k and v [B, S, G, D] to [B, S, N, D]."""
        flash, documents = self.sizes.flash, context.documents
        dropout = self.dropout if self.training else 0.0
        heads = tuple(x.transpose(1, 2) for x in (q, k, v))
        own = context.streams.drawing(q.device, self.place, self.stream) if dropout else nullcontext()
        with own:
            if context.plan is not None:
                y = attend_blockwise(
                    heads[0], heads[1], heads[2], Work(self.cp.transport, context.plan, flash, dropout)
                )
            elif documents is not None:
                packed = op("packed_attention", q) if flash else packed_attention_reference
                y = packed(*heads, documents=documents, dropout=dropout)
            elif dropout:
                attention = op("attention", q) if flash else attention_reference
                y = attention(*heads, causal=self.sizes.causal, valid=context.valid, dropout=dropout)
            else:
                y = self.run(attend, q, k, v, context.valid, self.sizes.causal, flash)
        return y.transpose(1, 2)


def split_heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, G, Q + 2, D] to q [B, S, N, D], k and v [B, S, G, D]."""
    q, k, v = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


@counted(2, 0, 0, 0, 2, 2)
def turned_heads(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``split_heads`` with q and k normed and turned, where weights and angles are given."""
    q, k, v = split_heads(qkv)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, epsilon), rms_norm(k, k_weight, epsilon)
    if cos is not None and sin is not None:
        q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
    return q, k, v


@counted(2, 2, 2, 2)
def attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, causal: bool, flash: bool) -> Tensor:
    """Attention without dropout: q [B, S, N, D], k and v [B, S, G, D] to [B, N, S, D]."""
    attention = op("attention", q) if flash else attention_reference
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, valid=valid)
