"""Matrix products of linear layers in fp8, forward and backward, by torchao.

Inputs, weights and gradients are scaled by their largest element, as they are at that moment, and rounded to e4m3;
sums are kept in fp32. Nothing is remembered from step to step, so checkpoints and layouts know nothing of it.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from megapar.core.tensor_parallel.layers import ColumnLinear, RowLinear

MULTIPLE = 16  # of every width, as the hardware wants it


def torchao_lacks() -> str:
    """Why torchao cannot be had; "" where it can."""
    return "" if importlib.util.find_spec("torchao") else "torchao is not installed (pip install torchao)"


class Fp8Linear:
    """x [.., I] @ w [O, I]^T + b [O] in fp8, for all layers except experts, router, embeddings and heads.

    emulated: the same roundings, computed in fp32 on any device.
    """

    def __init__(self, *, emulated: bool = False) -> None:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        # Padding is for the number of tokens, over which weight gradients are summed; widths need none.
        self._config = Float8LinearConfig(emulate=emulated, pad_inner_dim=True)
        products = ("output", "grad_input", "grad_weight")
        fast = [getattr(self._config, f"gemm_config_{name}").use_fast_accum for name in products]
        self._products = LinearMMConfig(*(ScaledMMConfig(emulated, accumulate, False, True) for accumulate in fast))
        self._multiply = matmul_with_hp_or_float8_args

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[.., I] to [.., O]."""
        y: Tensor = self._multiply.apply(x, weight.t(), self._products, self._config)
        return y if bias is None else y + bias


def odd_widths(model: nn.Module) -> list[str]:
    """Names of linear layers that have a width which fp8 products do not take."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, ColumnLinear | RowLinear):
            rows, columns = module.weight.shape[:-1], module.weight.shape[-1]
            if torch.Size(rows).numel() % MULTIPLE or columns % MULTIPLE:
                found.append(f"{name} {list(module.weight.shape)}")
    return found
