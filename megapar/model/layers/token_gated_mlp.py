"""An MLP whose output is gated by one number of each token: the shared experts of Qwen2-MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.compiled import counted
from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.layers import LayerOptions, local, parameter
from megapar.model.layers.mlp import Mlp

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TokenGatedMlp(Mlp):
    """sigmoid(x g^T) mlp(x); x [B, S(/mp), H], the gate's weight g [1, H] whole on all ranks.

    The gate multiplies the finished sum over mp, so every mp rank has its whole gradient for its positions: all
    positions, or a part of them under sequence parallelism, where the gradients are partial sums over mp.
    Source: Qwen2-MoE ("Qwen1.5-MoE", its model card; arXiv 2407.10671, section 2.2.2).
    """

    adds_onto = False

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, *, gated: bool, bias: bool, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(hidden_size, ffn_hidden_size, gated=gated, bias=bias, **options)
        self.token_gate = parameter((1, hidden_size), options["dtype"], options["device"])

    def forward(self, x: Tensor, ends_unit: Replay | None = None, onto: Tensor | None = None) -> Tensor:
        """Return [B, S(/mp), H] for x [B, S(/mp), H], or ``onto`` [B S(/mp), H] plus that.

        ends_unit: Ignored: the gate's backward needs the last product, so no recomputation skips it.
        """
        y = self.run(gate_tokens, super().forward(x), x, local(self.token_gate))
        return y if onto is None else onto + y.flatten(0, -2)


@counted(2, 2)
def gate_tokens(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return y [B, S, H] times sigmoid(x [B, S, H] weight [1, H]^T)."""
    return y * torch.sigmoid(F.linear(x, weight))
