"""One layer of each model: pre-norm for the decoder (dense or mixture of experts), post-norm for ERNIE.

Shape letters: B batch, S sequence, H hidden; S is cut over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import LayerOptions
from megapar.model.decoder.sizes import DecoderSizes, MoeSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.layers.ampipe import Sliced, run_sliced
from megapar.model.layers.attention_kinds import make_attention
from megapar.model.layers.attention_sizes import AttentionSizes
from megapar.model.layers.context import Context
from megapar.model.layers.mlp import Mlp
from megapar.model.layers.norm import LayerNorm, make_norm
from megapar.moe.layer import MoeLayer
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HiddenDropout(nn.Module):
    """Dropout on the output of one half of a layer. rank: this rank's positions differ from those of others."""

    def __init__(self, probability: float, layer: int, rank: int) -> None:
        super().__init__()
        self.probability, self.layer, self.rank = probability, layer, rank
        self.share = 1.0  # of the probability, where it grows

    def forward(self, x: Tensor, context: Context, half: str, number: int = 0) -> Tensor:
        """[B, S(/mp), H] to the same; half: attention or mlp; number: of the slice, where x is one of several."""
        if not self.training:
            return x
        place = context.place(f"layers.{self.layer}.{half}", number)
        return context.streams.dropout(x, self.probability * self.share, place, self.rank)


class DecoderBlock(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))), or experts in place of the mlp.

    All activations between the two halves are x [B, S(/mp), H]; the norms' gradients are partial over mp under
    sequence parallelism.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        layer: int,
        *,
        ep: Axis,
        emp: Axis,
        cp: ContextParallel,
        slicing: Slicing,
        moe_layer: type[MoeLayer] = MoeLayer,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        share = cp.share(options["mp"], sequence_parallel=options["sequence_parallel"])
        self.drop = HiddenDropout(sizes.hidden_dropout, layer, share.rank)
        self.slicing = slicing
        H, epsilon = sizes.hidden_size, sizes.layernorm_epsilon
        self.attention_norm = make_norm(sizes.normalization, H, epsilon, dtype=dtype, device=device, run=run)
        self.attention = make_attention(
            decoder_attention(sizes),
            layer,
            cp=cp,
            **options,
        )
        self.mlp_norm = make_norm(sizes.normalization, H, epsilon, dtype=dtype, device=device, run=run)
        self.mlp: Mlp | None = None
        self.moe: MoeLayer | None = None
        moe = sizes.moe_at(layer)
        if moe is not None:
            shared = _shared(sizes, moe, **options)
            self.moe = moe_layer(
                moe,
                shared=shared,
                ep=ep,
                emp=emp,
                share=share,
                slicing=slicing,
                **options,
            )
        else:
            self.mlp = Mlp(
                H,
                sizes.ffn_hidden_size,
                gated=sizes.gated,
                bias=sizes.add_bias_linear,
                **options,
            )

    def forward(self, x: Tensor | Sliced, context: Context) -> tuple[Tensor | Sliced, MoeStats | None]:
        """[B, S(/mp), H] to [B, S(/mp), H], and the routing statistics of a mixture-of-experts layer.

        Where the context has slices, layers run as drawn in ``model.layers.ampipe``.
        """
        # A rank of cp holds a part of every slice: of those attention knows, not of the sequence as a whole.
        apart = self.moe is not None or context.cut or self.attention.cp.active
        if isinstance(x, Sliced) or (context.slices and apart):
            return run_sliced(self, x, context)
        attended = self.attention(self.attention_norm(x), context)
        x, normed = self.mlp_norm.after(x, self.drop(attended, context, "attention"))
        if self.moe is None:
            assert self.mlp is not None
            return x + self.drop(self.mlp(normed, context.closing), context, "mlp"), None
        y, stats = self.moe(normed, context.own_valid, context.valid_tokens, context.replay, context.closing)
        return x + self.drop(y, context, "mlp"), stats


class ErnieBlock(nn.Module):
    """norm(x + dropout(attention(x))), then norm(x + dropout(mlp(x))): the norms stand behind the sums.

    x is [B, S(/mp), H] throughout; the norms' gradients are partial over mp under sequence parallelism.
    """

    def __init__(
        self,
        sizes: ErnieSizes,
        layer: int,
        *,
        cp: ContextParallel,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        mp, sequence_parallel = options["mp"], options["sequence_parallel"]
        self.cut = sequence_parallel and mp.size > 1  # its activations have some positions only
        share = cp.share(mp, sequence_parallel=sequence_parallel)
        self.drop = HiddenDropout(sizes.hidden_dropout, layer, share.rank)
        H, epsilon = sizes.hidden_size, sizes.layernorm_epsilon
        self.attention = make_attention(
            ernie_attention(sizes),
            layer,
            cp=cp,
            **options,
        )
        self.attention_norm = LayerNorm(H, epsilon, dtype=dtype, device=device, run=run)
        self.mlp = Mlp(
            H,
            sizes.ffn_hidden_size,
            gated=False,
            bias=True,
            **options,
        )
        self.mlp_norm = LayerNorm(H, epsilon, dtype=dtype, device=device, run=run)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, MoeStats | None]:
        """[B, S(/mp), H] to [B, S(/mp), H]; no statistics."""
        _, x = self.attention_norm.after(x, self.drop(self.attention(x, context), context, "attention"))
        _, y = self.mlp_norm.after(x, self.drop(self.mlp(x), context, "mlp"))
        return y, None


def decoder_attention(sizes: DecoderSizes) -> AttentionSizes:
    """The attention of a decoder layer."""
    return AttentionSizes(
        kind="grouped_query",
        hidden_size=sizes.hidden_size,
        num_groups=sizes.num_query_groups,
        queries_per_group=sizes.queries_per_group,
        key_dim=sizes.head_dim,
        value_dim=sizes.head_dim,
        causal=True,
        bias=sizes.add_bias_linear,
        qk_norm=sizes.qk_norm,
        epsilon=sizes.layernorm_epsilon,
        dropout=sizes.attention_dropout,
        flash=sizes.use_flash_attn,
    )


def ernie_attention(sizes: ErnieSizes) -> AttentionSizes:
    """The attention of an ERNIE layer: multi-head, so that every query head has its key-value head."""
    return AttentionSizes(
        kind="grouped_query",
        hidden_size=sizes.hidden_size,
        num_groups=sizes.num_attention_heads,
        queries_per_group=1,
        key_dim=sizes.head_dim,
        value_dim=sizes.head_dim,
        causal=False,
        bias=True,
        qk_norm=False,
        epsilon=sizes.layernorm_epsilon,
        dropout=sizes.attention_dropout,
        flash=sizes.use_flash_attn,
    )


def _shared(sizes: DecoderSizes, moe: MoeSizes, **options: Unpack[LayerOptions]) -> Mlp | None:
    """The shared experts: one MLP that every token passes; None where there are none."""
    if not moe.shared_experts:
        return None
    return Mlp(
        sizes.hidden_size,
        moe.shared_width,
        gated=moe.gated,
        bias=sizes.add_bias_linear,
        **options,
    )
