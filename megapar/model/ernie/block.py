"""One layer of ERNIE, post-norm: attention, then a dense MLP. ERNIE 3.0 builds on it.

Shape letters: B batch, S sequence, H hidden; S is split over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megapar.core.context_parallel.method import ContextParallel
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import LayerOptions
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.layers.context import Context
from megapar.model.layers.hidden_dropout import HiddenDropout
from megapar.model.layers.mlp import Mlp
from megapar.model.layers.norm import LayerNorm
from megapar.model.layers.self_attention import make_attention
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ErnieBlock(nn.Module):
    """Post-norm layer: norm(x + dropout(attention(x))), then norm(x + dropout(mlp(x))).

    x is [B, S(/mp), H] throughout. The norms' gradients are partial sums over mp under sequence parallelism.

    Attributes:
        cut: This rank's activations hold only some positions (sequence parallelism).
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
        self.cut = sequence_parallel and mp.size > 1
        share = cp.share(mp, sequence_parallel=sequence_parallel)
        self.drop = HiddenDropout(sizes.hidden_dropout, layer, share.rank)
        H, epsilon = sizes.hidden_size, sizes.layernorm_epsilon
        self.attention = make_attention(
            sizes.attention,
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
        """Return [B, S(/mp), H] for x [B, S(/mp), H], and None: the layer has no routing statistics."""
        _, x = self.attention_norm.after(x, self.drop(self.attention(x, context), context, "attention"))
        _, y = self.mlp_norm.after(x, self.drop(self.mlp(x), context, "mlp"))
        return y, None
