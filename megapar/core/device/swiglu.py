"""Swiglu: silu(gate) * up of a fused gate-up product, times a weight per row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device import triton_operators


def swiglu_reference(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up, then multiply by the weights. Returns [.., F].

    Args:
        gate_up: [.., 2, F].
        weights: [.., 1], in any dtype, rounded to that of ``gate_up``; None: no weights.
    """
    gate, up = gate_up.unbind(-2)
    activated = F.silu(gate) * up
    return activated if weights is None else activated * weights.to(activated.dtype)


def swiglu_cuda(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute ``swiglu_reference`` in one kernel in each direction, in Triton.

    Without Triton, compute it by the reference's kernels, with the gradients of gate and up in one buffer. A compiler
    fuses the reference.
    """
    if torch.compiler.is_compiling():
        return swiglu_reference(gate_up, weights)
    y: Tensor
    if in_one_kernel(gate_up):
        y = _RowSwiglu.apply(gate_up, weights)
        return y
    y = _Swiglu.apply(gate_up)
    return y if weights is None else y * weights.to(y.dtype)


def in_one_kernel(gate_up: Tensor) -> bool:
    """Return True if ``swiglu`` of this tensor is a single kernel, which a compiler would not improve."""
    return triton_operators.usable(gate_up.device) and gate_up.dtype != torch.float64


class _RowSwiglu(torch.autograd.Function):
    """Swiglu by a kernel in each direction. Keeps the inputs."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        return triton_operators.swiglu(gate_up, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        return triton_operators.swiglu_backward(grads[0], *ctx.saved_tensors)


class _Swiglu(torch.autograd.Function):
    """silu(gate) * up. Keeps what autograd keeps: gate and up, which lie in one tensor, and silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unbind(-2)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.unbind(-2)
        gradient = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
        d_gate, d_up = gradient.unbind(-2)
        torch.mul(grads[0], activated, out=d_up)
        torch.mul(grads[0], up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return gradient
