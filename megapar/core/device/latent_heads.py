"""Heads of latent attention: queries and keys whose last features alone are rotated, one rotary key for all heads.

    queries  [B, S, N, D]        plain | rotated                  rotated in the product's own memory
    product  [B, S, N, Dn + V]   plain key | value    \\
    rotary   [B, S, Dr]          shared by all heads  /  ->  k  plain | rotary | zeros,  v  value | zeros

Keys are written once. Values stay a view of the product unless the kernel of attention wants other head sizes
(``kernel_head_dims``).

Shape letters: B batch, S sequence, N heads, D features of a query or key head, Dn plain and Dr rotated ones, V features
of a value head.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.ascend import rotary_npu
from megapar.core.device.attention.whole import HeadWidths, pad_features
from megapar.core.device.rotary import rotary_reference, turn_


def rotate_last_reference(q: Tensor, cos: Tensor, sin: Tensor, factor: float, width: int) -> Tensor:
    """Rotate the last Dr features of q [B, S, N, D], multiply all by a factor and pad them to [B, S, N, width].

    cos and sin are [B, S, Dr / 2]; the factor comes in addition to that of the kernels on the scores.
    """
    return _rotate_last_by(rotary_reference, q, cos, sin, factor, width)


def rotate_last_npu(q: Tensor, cos: Tensor, sin: Tensor, factor: float, width: int) -> Tensor:
    """Compute ``rotate_last_reference`` by npu_rotary_mul."""
    return _rotate_last_by(rotary_npu, q, cos, sin, factor, width)


def _rotate_last_by(
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, cos: Tensor, sin: Tensor, factor: float, width: int
) -> Tensor:
    rotated = 2 * cos.shape[-1]
    plain, last = q.split((q.shape[-1] - rotated, rotated), dim=-1)
    y = torch.cat((plain, rotary(last, cos, sin)), dim=-1)
    return pad_features(y if factor == 1.0 else y * factor, width)


def rotate_last_in_place(q: Tensor, cos: Tensor, sin: Tensor, factor: float, width: int) -> Tensor:
    """Compute ``rotate_last_reference`` in the memory of q, features of a product that nothing else reads."""
    if torch.compiler.is_compiling():
        return rotate_last_reference(q, cos, sin, factor, width)
    y: Tensor = _RotateLast.apply(q, cos, sin, factor)
    return pad_features(y, width)


def join_heads_reference(product: Tensor, rotary: Tensor, plain: int, widths: HeadWidths) -> tuple[Tensor, Tensor]:
    """Make keys [B, S, N, key width] and values [B, S, N, value width].

    Args:
        product: Plain features of the keys and the values, [B, S, N, Dn + V].
        rotary: The rotary key of all heads, rotated, [B, S, Dr], in a dtype at least as wide as the product's.
    """
    value_dim = product.shape[-1] - plain
    key, value = product.split((plain, value_dim), dim=-1)
    shared = rotary.to(product.dtype).unsqueeze(2).expand(*product.shape[:3], -1)
    return pad_features(torch.cat((key, shared), dim=-1), widths.key), pad_features(value, widths.value)


def join_heads_once(product: Tensor, rotary: Tensor, plain: int, widths: HeadWidths) -> tuple[Tensor, Tensor]:
    """Compute ``join_heads_reference`` with one pass over the keys, and one over both gradients."""
    if torch.compiler.is_compiling():
        return join_heads_reference(product, rotary, plain, widths)
    k, v = _JoinHeads.apply(product, rotary, plain, widths)
    return k, v


def join_heads_apart(product: Tensor, rotary: Tensor, plain: int, widths: HeadWidths) -> tuple[Tensor, Tensor]:
    """Compute ``join_heads_once`` for kernels that would copy values which are not together in memory."""
    k, v = join_heads_once(product, rotary, plain, widths)
    return k, v.contiguous()


class _RotateLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, cos: Tensor, sin: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.factor = factor
        # ``data`` has a separate version counter; the product that made q does not keep it.
        _turn_last(q.data, q.data, cos, sin, factor)
        return q.view_as(q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dq = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        _turn_last(grads[0], dq, cos, -sin, ctx.factor)
        return dq, None, None, None


def _turn_last(x: Tensor, into: Tensor, cos: Tensor, sin: Tensor, factor: float) -> None:
    """Write x [B, S, N, D] times ``factor``, its last features rotated, into a tensor, which may be x itself."""
    plain = x.shape[-1] - 2 * cos.shape[-1]
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
        torch.mul(x[..., :plain], factor, out=into[..., :plain])
    elif into is not x:
        into[..., :plain].copy_(x[..., :plain])
    last = x[..., plain:]
    wide = torch.empty(last.shape, dtype=cos.dtype, device=x.device).copy_(last)
    into[..., plain:].copy_(turn_(wide, cos, sin))


class _JoinHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, rotary: Tensor, plain: int, widths: HeadWidths) -> tuple[Tensor, Tensor]:
        ctx.plain, ctx.features, ctx.rotary = plain, product.shape[-1], (rotary.shape[-1], rotary.dtype)
        key_dim = plain + rotary.shape[-1]
        k = product.new_empty((*product.shape[:3], widths.key))
        k[..., :plain].copy_(product[..., :plain])
        k[..., plain:key_dim].copy_(rotary.unsqueeze(2).expand(*product.shape[:3], -1))
        if widths.key > key_dim:
            k[..., key_dim:].zero_()
        value = product[..., plain:]
        if value.shape[-1] == widths.value:
            return k, value
        v = product.new_empty((*product.shape[:3], widths.value))
        v[..., : value.shape[-1]].copy_(value)
        v[..., value.shape[-1] :].zero_()
        return k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dk, dv = grads
        rotated, dtype = ctx.rotary
        dproduct = dk.new_empty((*dk.shape[:3], ctx.features))
        dproduct[..., : ctx.plain].copy_(dk[..., : ctx.plain])
        dproduct[..., ctx.plain :].copy_(dv[..., : ctx.features - ctx.plain])
        shared = dk[..., ctx.plain : ctx.plain + rotated].sum(2, dtype=dtype)  # 16-bit sums are fp32 until rounded
        return dproduct, shared, None, None
