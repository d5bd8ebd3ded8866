"""Rotary embedding of queries and keys: a reference, a complex product, and one that starts from the fused product.

Angles are (cos, sin), [B, S, D / 2] each, in max(fp32, dtype).

Shape letters: B batch, S sequence, G groups (key-value heads), Q query heads per group, N query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device import triton_operators

Heads = tuple[Tensor, Tensor, Tensor]


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i + 1]) by their angles, in max(fp32, dtype).

    Source: GPT-J's interleaved rotary embedding, as ERNIE 4.5 uses it.

    Args:
        x: [B, S, N, D].
        cos: [B, S, D / 2].
        sin: [B, S, D / 2].
    """
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def rotary_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute ``rotary_reference`` by one product of complex numbers in each direction, which keeps only the angles.

    A compiler fuses the reference into one kernel, and does not fuse complex numbers.
    """
    if torch.compiler.is_compiling():
        return rotary_reference(x, cos, sin)
    return _Rotary.apply(x, cos, sin)


def split_heads(qkv: Tensor) -> Heads:
    """Split [B, S, G, Q + 2, D] into q [B, S, N, D], k and v [B, S, G, D]."""
    return _split(qkv) if torch.compiler.is_compiling() else _SplitHeads.apply(qkv)


def _split(qkv: Tensor) -> Heads:
    q, k, v = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def rotary_heads_by(rotary: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Heads]:
    """Return a function that splits heads as ``split_heads`` does, and rotates q and k by ``rotary``."""

    def rotary_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        q, k, v = split_heads(qkv)
        return rotary(q, cos, sin), rotary(k, cos, sin), v

    return rotary_heads


rotary_heads_reference = rotary_heads_by(rotary_reference)


def rotary_heads_at_once(qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
    """Compute ``rotary_heads_reference``, with q and k in one product, and all gradients in one buffer."""
    if torch.compiler.is_compiling():
        return rotary_heads_reference(qkv, cos, sin)
    return _RotaryHeads.apply(qkv, cos, sin)


def rotary_heads_in_one_kernel(qkv: Tensor) -> bool:
    """Return True if ``rotary_heads`` of this tensor is a single kernel, which a compiler would not improve."""
    return triton_operators.takes_heads(qkv) and qkv.dtype != torch.float64


def turn_(wide: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate wide [B, S, .., D] in place, in the dtype of its angles."""
    pairs = torch.view_as_complex(wide.view(*wide.shape[:-1], wide.shape[-1] // 2, 2))
    # [B, S, 1.., D / 2], complex
    pairs.mul_(torch.complex(cos, sin).view(*cos.shape[:2], *(1,) * (wide.dim() - 3), cos.shape[-1]))
    return wide


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def _joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Undo ``split_heads``, by rows of a matrix: torch copies tensors of more than four dims one by one on a GPU."""
    (B, S, G, D), together = k.shape, q.shape[2] // k.shape[2] + 2
    rows = [x.reshape(B * S * G, width * D) for x, width in ((q, together - 2), (k, 1), (v, 1))]
    return torch.cat(rows, dim=1).view(B, S, G, together, D)


class _SplitHeads(torch.autograd.Function):
    """Split of qkv [B, S, G, Q + 2, D] into views where possible."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Heads:
        return _split(qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _joined(*grads)


class _Rotary(torch.autograd.Function):
    """Rotation of x [B, S, N, D]; the backward rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn_(_copied(x, cos.dtype), cos, sin).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn_(_copied(grads[0], cos.dtype), cos, -sin).to(grads[0].dtype), None, None


class _RotaryHeads(torch.autograd.Function):
    """Split of qkv [B, S, G, Q + 2, D] and rotation of q and k, which lie next to each other in it."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.by_kernel = triton_operators.takes_heads(qkv)
        if ctx.by_kernel:
            return triton_operators.rotary_heads(qkv, cos, sin)
        Q = qkv.shape[3] - 2
        wide = turn_(_copied(qkv.narrow(3, 0, Q + 1), cos.dtype), cos, sin)
        q, k = (_copied(part, qkv.dtype) for part in (wide.narrow(3, 0, Q), wide.select(3, Q)))
        return q.flatten(2, 3), k, qkv.select(3, Q + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        dq, dk, dv = grads
        if ctx.by_kernel:
            return triton_operators.rotary_heads_backward(dq, dk, dv, cos, sin), None, None
        dqkv = _joined(dq, dk, dv)
        both = dqkv.narrow(3, 0, dqkv.shape[3] - 1)
        if both.dtype == cos.dtype:
            turn_(both, cos, -sin)
        else:
            both.copy_(turn_(_copied(both, cos.dtype), cos, -sin))
        return dqkv, None, None
