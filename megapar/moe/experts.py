"""The routed experts of this rank: one small MLP each, their weights stacked.

Shape letters: R rows sorted by expert, H hidden, E experts on this rank, F expert intermediate features on
this rank (E and F are global sizes divided by the ep and emp sizes).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapar.core.device.ops import op
from megapar.core.selective import forget
from megapar.core.tensor_parallel import local
from megapar.core.weight_gradients import Later, WeightGradients
from megapar.moe.grouped import grouped_linear


class Experts(nn.Module):
    """rows [R, H] -> up [R, F] -> rows [R, H], each row through its own expert.

    Ledger (this rank):
        gate_up [E, 2, F, H] (swiglu: gate at 0, up at 1) or up [E, F, H] (gelu)
        down [E, H, F]; with ``add_bias``: gate_up_bias [E, 2, F] or up_bias [E, F], down_bias [E, H]
        forward   grouped product, activation, grouped product; no collective
        dgrad     grouped products with the weights as they lie; no collective
        wgrad     one [out, in] product per expert over its rows, whole on its rank
    Where F is cut over emp, the result is a partial sum over emp and so is dgrad; down_bias [E, H] is then whole on
    every rank of emp, enters the sum on the first (``adds_down_bias``) and has the whole gradient on all.
    Parameters are created uninitialised.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        gated: bool,
        add_bias: bool,
        adds_down_bias: bool = True,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gated = gated
        self.has_bias = add_bias
        self.selective = False  # compute the activation again instead of keeping it
        self.adds_down_bias = adds_down_bias

        def create(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, dtype=dtype, device=device))

        up = (2, ffn_hidden_size) if gated else (ffn_hidden_size,)
        self.up_name = "gate_up" if gated else "up"
        self.register_parameter(self.up_name, create(*up, hidden_size))
        self.down = create(hidden_size, ffn_hidden_size)
        self.register_parameter(f"{self.up_name}_bias", create(*up) if add_bias else None)
        self.register_parameter("down_bias", create(hidden_size) if add_bias else None)
        self.weight_gradients: WeightGradients | None = None

    def forward(self, rows_RH: Tensor, counts_E: Tensor) -> Tensor:
        """[R, H] expert outputs, unweighted. counts_E: int64, rows of each expert; they sum to R."""
        up = local(getattr(self, self.up_name))
        expert_R = None
        if self.has_bias:
            expert_R = torch.repeat_interleave(counts_E, output_size=rows_RH.shape[0])
        hidden = grouped_linear(rows_RH, up.flatten(1, -2), counts_E, self._later(self.up_name))
        if expert_R is not None:
            hidden = hidden + self._bias(f"{self.up_name}_bias", expert_R)

        def down(inner: Tensor) -> Tensor:
            return grouped_linear(inner, local(self.down), counts_E, self._later("down"))

        out_RH = forget(self._activate, hidden, down) if self.selective else down(self._activate(hidden))
        if expert_R is not None:
            out_RH = _AddOnce.apply(out_RH, self._bias("down_bias", expert_R), self.adds_down_bias)
        return out_RH

    def _later(self, name: str) -> Later | None:
        return None if self.weight_gradients is None else self.weight_gradients.of(getattr(self, name))

    def _activate(self, hidden: Tensor) -> Tensor:
        return op("swiglu", hidden)(hidden.unflatten(1, (2, -1))) if self.gated else F.gelu(hidden)

    def _bias(self, name: str, expert_R: Tensor) -> Tensor:
        """The bias of each row's expert."""
        bias: Tensor = local(getattr(self, name))
        return bias.flatten(1).index_select(0, expert_R)


class _AddOnce(torch.autograd.Function):
    """x + bias on one rank and x on the others, which are summed afterwards: the gradient is whole on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, adds: bool) -> Tensor:
        return x + bias if adds else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0], None
