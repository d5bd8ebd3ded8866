"""Dense feed-forward layer: swiglu, plain or clamped, or geglu on a fused gate-up weight, or gelu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.device.compiled import counted, plain
from megapar.core.device.layer_ops import BiasedGelu, in_one_kernel
from megapar.core.device.ops import op
from megapar.core.recompute.replay import Replay
from megapar.core.recompute.selective import without_output
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.fp8 import cast_swiglu, leaves_casts
from megapar.core.tensor_parallel.layers import ColumnLinear, LayerOptions, RowLinear, local, parameter

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Mlp(nn.Module):
    """Column parallel layer, activation, row parallel layer; F intermediate features, split over mp.

    gated:     x [B, S(/mp), H] -> gate_up: column linear -> [B, S, 2, F/mp] -> silu(gate) * up, or another gate
    otherwise: x [B, S(/mp), H] -> up: column linear -> [B, S, F/mp] -> gelu (exact, by erf)
    then       -> down: row linear -> y [B, S(/mp), H]
    """

    adds_onto = True  # it takes a sum to add to

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        gated: bool,
        bias: bool,
        clamped: bool = False,
        tanh: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        """Build the layer. clamped, tanh: With the gate of ``clamped_swiglu`` or of ``geglu``."""
        super().__init__()
        first = ColumnLinear(
            hidden_size,
            (2, ffn_hidden_size) if gated else (ffn_hidden_size,),
            split=1 if gated else 0,
            bias=bias,
            **options,
        )
        execution = options.get("execution", DEFAULT)
        self.run, self.selective = execution.run, execution.selective
        gate = geglu if tanh else clamped_swiglu if clamped else swiglu
        self.activation = gate if gated else gelu
        first.leaves_bias = bias and not gated and not self.selective
        self.gate_up = first if gated else None
        self.up = None if gated else first
        self.down = RowLinear(ffn_hidden_size, hidden_size, bias=bias, **options)
        self.casts = execution.fp8 if options["mp"].size == 1 and self.activation in (swiglu, clamped_swiglu) else None

    def forward(self, x: Tensor, ends_unit: Replay | None = None, onto: Tensor | None = None) -> Tensor:
        """Return [B, S(/mp), H] for x [B, S(/mp), H].

        Args:
            ends_unit: The recomputed unit whose output is made here; its recomputation skips the last product.
            onto: A sum [B S(/mp), H] to add the output to, which is returned in its place (``RowLinear``).
        """
        activation: Callable[[Tensor], Tensor] = self.activation
        first = self.up if self.gate_up is None else self.gate_up
        assert first is not None
        hidden = first(x)
        if first.bias is not None and first.leaves_bias and in_one_kernel(hidden):
            return self.down(BiasedGelu.apply(hidden, local(first.bias)), ends_unit, onto)
        has_kernel = activation in (swiglu, clamped_swiglu) and in_one_kernel(hidden)
        run = plain if has_kernel and self.run is not plain else self.run
        if run is plain and leaves_casts(self.casts, hidden):
            activation = partial(cast_swiglu, casts=self.casts, clamped=activation is clamped_swiglu)
        if self.selective:
            return without_output(partial(run, activation), hidden, partial(self.down, onto=onto))
        return self.down(run(activation, hidden), ends_unit, onto)


@counted(2)
def gelu(x: Tensor) -> Tensor:
    """Apply the exact gelu, by erf."""
    return F.gelu(x)


@counted(2)
def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [.., F], for gate and up in [.., 2, F]."""
    return op("swiglu", gate_up)(gate_up)


@counted(2)
def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Return the clamped swiglu, [.., F], of gate and up in [.., 2, F]."""
    return op("clamped_swiglu", gate_up)(gate_up)


@counted(2)
def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, [.., F], for gate and up in [.., 2, F]; gelu in its approximation by tanh (Gemma)."""
    gate, up = gate_up.unbind(-2)
    return F.gelu(gate, approximate="tanh") * up


class TokenGatedMlp(Mlp):
    """sigmoid(x g^T) mlp(x); x [B, S(/mp), H], the gate's weight g [1, H] whole on all ranks.

    The gate multiplies the finished sum over mp, so every mp rank has its whole gradient for its positions: all
    positions, or a part of them under sequence parallelism, where the gradients are partial sums over mp.
    Source: Qwen2-MoE ("Qwen1.5-MoE", its model card; arXiv 2407.10671, section 2.2.2).
    """

    adds_onto = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        gated: bool,
        bias: bool,
        clamped: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(hidden_size, ffn_hidden_size, gated=gated, bias=bias, clamped=clamped, **options)
        self.token_gate = parameter((1, hidden_size), options["dtype"], options["device"])

    def forward(self, x: Tensor, ends_unit: Replay | None = None, onto: Tensor | None = None) -> Tensor:
        """Return [B, S(/mp), H] for x [B, S(/mp), H], or ``onto`` [B S(/mp), H] plus that.

        ``ends_unit`` is ignored: the gate's backward needs the last product, so no recomputation skips it.
        """
        y = self.run(gate_tokens, super().forward(x), x, local(self.token_gate))
        return y if onto is None else onto + y.flatten(0, -2)


@counted(2, 2)
def gate_tokens(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return y [B, S, H] times sigmoid(x [B, S, H] weight [1, H]^T)."""
    return y * torch.sigmoid(F.linear(x, weight))
