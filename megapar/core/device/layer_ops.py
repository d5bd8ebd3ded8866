"""Operators of layers: RMS norm, swiglu, embeddings of few rows, and cross-entropy, each with a plain reference.

Shape letters: N rows (tokens) or indices, V vocabulary, C rows of an embedding, H hidden, F features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device import triton_operators
from megapar.core.device.dtypes import add_product_reference, add_product_wide, at_least_fp32


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + epsilon) * weight over the last dim, in max(fp32, dtype)."""
    x_wide = x.to(at_least_fp32(x.dtype))
    scale = torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (x_wide * scale).to(x.dtype)


def rms_norm_fused(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute ``rms_norm_reference`` by one kernel, which rounds once, after the weight."""
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


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
        y = _RowSwiglu.apply(gate_up, weights, False)
        return y
    y = _Swiglu.apply(gate_up)
    return y if weights is None else y * weights.to(y.dtype)


def in_one_kernel(gate_up: Tensor) -> bool:
    """Return True if ``swiglu`` of this tensor is a single kernel, which a compiler would not improve."""
    return triton_operators.usable(gate_up.device) and gate_up.dtype != torch.float64


class _RowSwiglu(torch.autograd.Function):
    """Swiglu, plain or clamped, by a kernel in each direction. Keeps the inputs."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, clamped: bool) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.clamped = clamped
        return triton_operators.swiglu(gate_up, weights, clamped=clamped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *triton_operators.swiglu_backward(grads[0], *ctx.saved_tensors, clamped=ctx.clamped), None


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


class BiasedGelu(torch.autograd.Function):
    """Gelu of x [.., F], and the gradient of the bias [F] that is in x, by one operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.megapar.gelu_backward(*(t.contiguous() for t in (grads[0], *ctx.saved_tensors)))


class DroppedSumNorm(torch.autograd.Function):
    """layer_norm(x + dropout(y)), x [.., H], and the gradient of the bias [H] in y, by one operator with the others.

    All have one dtype and are ``in_one_kernel``, with at most ``triton_operators.MOST_NORMED`` features.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, norm_bias: Tensor, bias: Tensor, epsilon: float, dropped: float
    ) -> Tensor:
        y, kept = torch.native_dropout(y.contiguous(), dropped, True) if dropped else (y, None)
        total, ctx.scale = (x + y).contiguous(), 1 / (1 - dropped) if dropped < 1 else 0.0
        result, *statistics = torch.native_layer_norm(total, total.shape[-1:], weight, norm_bias, epsilon)
        ctx.save_for_backward(total, *statistics, weight, kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dropped, sums = torch.ops.megapar.norm_backward(grads[0].contiguous(), *ctx.saved_tensors, ctx.scale)
        return dx, dropped if dropped.numel() else dx, *sums.unbind(), None, None


GATE_LIMIT, GATE_SLOPE = 7.0, 1.702  # of clamped swiglu: transformers' swiglu_limit and swiglu_alpha


def clamped_swiglu_reference(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute (up + 1) gate sigmoid(1.702 gate), gate at most 7 and up from -7 to 7, then multiply by the weights.

    It computes in max(fp32, dtype), rounds once, and keeps its inputs alone. Source: GPT-OSS (arXiv 2508.10925).
    Arguments and result as of ``swiglu_reference``.
    """
    if torch.compiler.is_compiling():
        return _clamped(gate_up, weights)[0].to(gate_up.dtype)
    y: Tensor = _ClampedSwiglu.apply(gate_up, weights)
    return y


def clamped_swiglu_cuda(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute ``clamped_swiglu_reference`` in one kernel in each direction, in Triton, where there is Triton."""
    if torch.compiler.is_compiling() or not in_one_kernel(gate_up):
        return clamped_swiglu_reference(gate_up, weights)
    y: Tensor = _RowSwiglu.apply(gate_up, weights, True)
    return y


def _clamped(gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the product with the weights, the limited gate and up, and the sigmoid, in max(fp32, dtype)."""
    gate, up = gate_up.to(at_least_fp32(gate_up.dtype)).unbind(-2)
    limited = _limited if torch.is_grad_enabled() else torch.clamp
    gate, up = limited(gate, -math.inf, GATE_LIMIT), limited(up, -GATE_LIMIT, GATE_LIMIT)
    opened = torch.sigmoid(GATE_SLOPE * gate)
    y = (up + 1) * gate * opened
    return y if weights is None else y * weights.to(y.dtype), gate, up, opened


def _limited(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp, with the gradient of a limit's own value as inside of it: torch's clamp has 0 there from 2.14 on."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


class _ClampedSwiglu(torch.autograd.Function):
    """Clamped swiglu that is computed again in the backward, which takes a limit's own value as inside of it."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        return _clamped(gate_up, weights)[0].to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up, weights = ctx.saved_tensors
        y, gate, up, opened = _clamped(gate_up, None)
        grad, of_weights = grads[0].to(y.dtype), None
        if weights is not None:
            of_weights = (grad * y).sum(-1, keepdim=True).to(weights.dtype)
            grad = grad * weights.to(y.dtype)
        raw_gate, raw_up = gate_up.unbind(-2)
        of_gate = grad * (up + 1) * opened * (1 + GATE_SLOPE * gate * (1 - opened)) * (raw_gate <= GATE_LIMIT)
        of_up = grad * gate * opened * (raw_up.abs() <= GATE_LIMIT)
        return torch.stack((of_gate, of_up), dim=-2).to(gate_up.dtype), of_weights


def small_embedding_reference(weight: Tensor, *, indices: Tensor) -> Tensor:
    """Look up indices [..] int64 in weight [C, H]. Returns [.., H]."""
    return F.embedding(indices, weight)


def small_embedding_by_product(weight: Tensor, *, indices: Tensor) -> Tensor:
    """Compute ``small_embedding_reference`` with a product for the gradient of the weight.

    On a GPU, torch sorts the indices in 14 kernels; this takes four. The product adds in fp32 and rounds once, too.
    """
    return _ByProduct.apply(weight, indices)


class _ByProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (indices,), grad = ctx.saved_tensors, grads[0]
        rows = torch.arange(ctx.rows, device=indices.device)
        one_hot = grad.new_empty(indices.numel(), ctx.rows)
        torch.eq(indices.flatten().unsqueeze(-1), rows, out=one_hot)
        total = grad.new_empty(ctx.rows, grad.shape[-1], dtype=at_least_fp32(grad.dtype))
        add_product = add_product_wide if grad.is_cuda else add_product_reference
        add_product(total, one_hot.t(), grad.flatten(0, -2), begins=True)
        return total.to(grad.dtype), None


def cross_entropy_reference(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of labels and the gradient of the sum of cross-entropies. Overwrites ``logits``.

    Args:
        logits: [N, V] in max(fp32, dtype).
        labels: [N] int64.

    Returns:
        The log-probabilities [N], and the gradient [N, V], softmax - 1 at the label.
    """
    column = labels.unsqueeze(-1)
    logits.sub_(logits.amax(-1, keepdim=True))
    target = logits.gather(-1, column)
    total = logits.exp_().sum(-1, keepdim=True)
    logits.mul_(total.reciprocal())
    logits.scatter_add_(-1, column, -torch.ones_like(total))
    return (target - total.log()).squeeze(-1), logits.to(dtype)


def cross_entropy_fused(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute ``cross_entropy_reference`` by Triton's kernels, or else by the log-softmax and its exponential.

    Each thread of the log-softmax reads an element before it writes it, so the output replaces the input.
    """
    if dtype != logits.dtype and triton_operators.usable(logits.device):  # of the same dtype, one buffer is enough
        return triton_operators.cross_entropy(logits, labels, dtype)
    column = labels.unsqueeze(-1)
    torch.log_softmax(logits, -1, out=logits)
    target = logits.gather(-1, column)
    gradient = logits.exp_() if dtype == logits.dtype else torch.exp(logits, out=torch.empty_like(logits, dtype=dtype))
    gradient.scatter_(-1, column, torch.expm1(target).to(dtype))
    return target.squeeze(-1), gradient
