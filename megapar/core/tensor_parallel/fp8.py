"""Matrix products of linear layers in fp8, forward and backward, by torchao.

Inputs, weights and gradients are scaled dynamically, by their largest element at that moment, and rounded to e4m3. Sums
are accumulated in fp32. Nothing is kept from step to step, so checkpoints and layouts are independent of fp8.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from megapar.core.tensor_parallel.layers import ColumnLinear, ReplicatedLinear, RowLinear

MULTIPLE = 16  # The hardware requires every width to be a multiple of this.


def torchao_lacks() -> str:
    """Return the reason why torchao cannot be used, or "" if it can."""
    return "" if importlib.util.find_spec("torchao") else "torchao is not installed (pip install torchao)"


class Fp8Linear:
    """x [.., I] @ w [O, I]^T + b [O] in fp8, for all layers except experts, router, embeddings and heads."""

    def __init__(self, *, emulated: bool = False) -> None:
        """Configure the products; ``emulated`` applies the same rounding in fp32, on any device."""
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        # Padding is for the number of tokens, the inner dim of weight gradients; widths need none.
        self._config = Float8LinearConfig(emulate=emulated, pad_inner_dim=True)
        products = ("output", "grad_input", "grad_weight")
        fast = [getattr(self._config, f"gemm_config_{name}").use_fast_accum for name in products]
        self._products = LinearMMConfig(*(ScaledMMConfig(emulated, accumulate, False, True) for accumulate in fast))
        self._multiply = matmul_with_hp_or_float8_args

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply [.., I] to [.., O]."""
        y: Tensor = self._multiply.apply(x, weight.t(), self._products, self._config)
        return y if bias is None else y + bias


def odd_widths(model: nn.Module) -> list[str]:
    """Return name and shape of each linear layer with a width that is not a multiple of ``MULTIPLE``."""
    odd = []
    for name, module in model.named_modules():
        if isinstance(module, ColumnLinear | ReplicatedLinear | RowLinear):
            rows, columns = module.weight.shape[:-1], module.weight.shape[-1]
            if torch.Size(rows).numel() % MULTIPLE or columns % MULTIPLE:
                odd.append(f"{name} {list(module.weight.shape)}")
    return odd
