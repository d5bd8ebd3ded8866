"""Swiglu: silu(gate) * up of a fused gate-up product.

Tested in ``tests/core/device/test_ops.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up for gate_up [.., 2, F]. Returns [.., F]."""
    gate, up = gate_up.unbind(-2)
    return F.silu(gate) * up


def swiglu_cuda(gate_up: Tensor) -> Tensor:
    """Compute ``swiglu_reference``, with the gradients of gate and up in one buffer, by the same kernels otherwise.

    A compiler fuses the reference into one kernel.
    """
    if torch.compiler.is_compiling():
        return swiglu_reference(gate_up)
    y: Tensor = _Swiglu.apply(gate_up)
    return y


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
