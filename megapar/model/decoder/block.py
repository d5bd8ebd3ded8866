"""One layer of the decoder: attention, then a dense MLP or a mixture of experts, with norms before or after each.

Shape letters: B batch, S sequence, H hidden; S is split over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.compiled import plain
from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import LayerOptions
from megapar.model.ampipe import Sliced, run_sliced
from megapar.model.attention.self_attention import make_attention
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.layers.context import Context
from megapar.model.layers.mlp import Mlp, TokenGatedMlp
from megapar.model.layers.norm import Norm, make_norm
from megapar.model.layers.residual import HiddenDropout, PendingSum
from megapar.model.sizes import GEGLU
from megapar.moe.layer import MoeLayer, MoeParts
from megapar.moe.sizes import MoeSizes
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DecoderBlock(nn.Module):
    """Layer with norms of inputs: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))); mlp may be experts.

    With norms of outputs (OLMo 2): x + dropout(norm(attention(x))), then x + dropout(norm(mlp(x))).
    With both (Gemma 3): x + dropout(norm(attention(norm(x)))), then x + dropout(norm(mlp(norm(x)))).
    All activations between attention and mlp are [B, S(/mp), H]. The norms' gradients are partial sums over mp under
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
        moe_parts: MoeParts | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        share = cp.share(options["mp"], sequence_parallel=options["sequence_parallel"])
        self.compiled = run is not plain
        self.drop = HiddenDropout(sizes.hidden_dropout, layer, share.rank, sizes.residual_multiplier)
        self.norms_outputs = sizes.norm_placement == "output"
        H, epsilon, one_plus = sizes.hidden_size, sizes.layernorm_epsilon, sizes.apply_layernorm_1p
        norm = partial(make_norm, sizes.normalization, H, epsilon, dtype=dtype, device=device, one_plus=one_plus)
        self.attention_norm, self.mlp_norm = norm(run=run), norm(run=run)
        self.attention = make_attention(sizes.attention_at(layer), layer, cp=cp, **options)
        self.attention_output_norm: Norm | None = None
        self.mlp_output_norm: Norm | None = None
        if sizes.norm_placement == "both":
            self.attention_output_norm, self.mlp_output_norm = norm(run=run), norm(run=run)
        self.mlp: Mlp | None = None
        self.moe: MoeLayer | None = None
        moe = sizes.moe_at(layer)
        if moe is not None:
            shared = _shared(sizes, moe, **options)
            self.moe = MoeLayer(moe, shared=shared, ep=ep, emp=emp, share=share, parts=moe_parts, **options)
        else:
            clamped, tanh = sizes.activation == "clamped_swiglu", sizes.activation == GEGLU
            ffn, bias = sizes.ffn_hidden_size, sizes.add_bias_linear
            self.mlp = Mlp(H, ffn, gated=sizes.gated, clamped=clamped, tanh=tanh, bias=bias, **options)
        fp8 = options.get("execution", DEFAULT).fp8
        gathers = options["mp"].size > 1 and options["sequence_parallel"]
        if fp8 is not None and not gathers and not self.norms_outputs:
            self.attention_norm.casts = None if sizes.multi_latent_attention else fp8
            self.mlp_norm.casts = fp8 if moe is None else None

    def forward(
        self, x: Tensor | Sliced | PendingSum, context: Context
    ) -> tuple[Tensor | Sliced | PendingSum, MoeStats | None]:
        """Return [B, S(/mp), H] for x [B, S(/mp), H], and the routing statistics of a mixture-of-experts layer.

        If the context has slices, the layer runs as drawn in ``model.ampipe``. If functions are compiled and
        another layer follows, the last sum is left to it.
        """
        if self.norms_outputs or self.mlp_output_norm is not None:
            assert isinstance(x, Tensor)
            return (self._norm_outputs if self.norms_outputs else self._norm_both)(x, context)
        # Under context parallelism the rank holds a part of each slice, so attention must run slice by slice.
        apart = self.moe is not None or context.cut or self.attention.cp.active
        if isinstance(x, Sliced) or (context.slices and apart):
            assert not isinstance(x, PendingSum)
            return run_sliced(self, x, context)
        if isinstance(x, PendingSum):
            x, normed = self.attention_norm.after(x.residual, x.output)
        else:
            normed = self.attention_norm(x)
        x, normed = self.mlp_norm.after(x, self.drop(self.attention(normed, context), context, "attention"))
        y, stats = self._feed_forward(normed, context, context.ends_unit)
        y = self.drop(y, context, "mlp")
        later = self.compiled and context.followed and not context.slices
        return (PendingSum(x, y) if later else x + y), stats

    def _norm_outputs(self, x: Tensor, context: Context) -> tuple[Tensor, MoeStats | None]:
        """Return ``forward`` of a layer that normalizes the outputs of attention and MLP."""
        x = x + self.drop(self.attention_norm(self.attention(x, context)), context, "attention")
        # The norm's backward needs the last product, so no recomputation skips it.
        y, stats = self._feed_forward(x, context, None)
        return x + self.drop(self.mlp_norm(y), context, "mlp"), stats

    def _norm_both(self, x: Tensor, context: Context) -> tuple[Tensor, MoeStats | None]:
        """Return ``forward`` of a layer that normalizes inputs and outputs of attention and MLP."""
        assert self.attention_output_norm is not None
        assert self.mlp_output_norm is not None
        y = self.attention_output_norm(self.attention(self.attention_norm(x), context))
        x, normed = self.mlp_norm.after(x, self.drop(y, context, "attention"))
        y, stats = self._feed_forward(normed, context, None)
        return x + self.drop(self.mlp_output_norm(y), context, "mlp"), stats

    def _feed_forward(self, x: Tensor, context: Context, ends_unit: Replay | None) -> tuple[Tensor, MoeStats | None]:
        """Run the MLP or the experts. Returns [B, S(/mp), H], and the experts' routing statistics."""
        if self.moe is None:
            assert self.mlp is not None
            return self.mlp(x, ends_unit), None
        y, stats = self.moe(x, context.own_valid, context.valid_tokens, context.replay, ends_unit)
        return y, stats


def _shared(sizes: DecoderSizes, moe: MoeSizes, **options: Unpack[LayerOptions]) -> Mlp | None:
    """Build the shared experts, one MLP that every token passes through. Return None for a layer without them."""
    if not moe.shared_width:
        return None
    kind = TokenGatedMlp if moe.shared_gate else Mlp
    H, bias = sizes.hidden_size, sizes.add_bias_linear
    return kind(H, moe.shared_width, gated=moe.gated, clamped=moe.clamped, bias=bias, **options)
