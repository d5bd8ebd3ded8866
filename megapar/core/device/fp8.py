"""Casts to fp8 (e4m3) with a scale per block, and matrix products of what they return.

    rows of an input or a gradient [R, K]   a scale for every 128 features of a row    torch's BlockWise1x128
    weight [N, K]                           a scale for every 128 x 128 block          BlockWise128x128
    rows of experts [R, K], [E, N, K]       a scale for every row                      RowWise
    any, by the recipe ``tensorwise``       one scale                                  TensorWise

RowWise is what torch has for grouped products on Hopper. K is contracted. A scale is the smallest power of two by
which the largest number that it belongs to becomes at most 448, the largest e4m3 number, so that dividing by it is
exact. Where ranks cut features at multiples of 128, and those of experts not at all, every scale depends on numbers of
one rank only. A number that is not finite becomes NaN, and the scale is that of the others.

The reference multiplies the dequantized operands in their dtype, which emulates the hardware exactly but for the order
of its sums. GPUs accumulate in fp32.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device import triton_operators
from megapar.core.device.grouped import grouped_linear_reference, row_ends
from megapar.core.device.layer_ops import clamped_swiglu_reference, rms_norm_reference, swiglu_reference

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128
SCALES_TOGETHER = 4  # a weight's scales of consecutive features are filled up to a multiple of this
_HALF_ABOVE = 0x1FFFFF  # added to the bits of fp32, it carries into the exponent from above 1.75 = 448 / 2^8 on


class ScaledRows(NamedTuple):
    """Rows in e4m3, times their scales.

    Attributes:
        values: [R, K] e4m3; on GPUs rows of zeros follow, up to a multiple of 16.
        scale: [R, K / 128] fp32, of which the rows are together in memory; [1] of a tensor with one scale.
    """

    values: Tensor
    scale: Tensor


class ScaledWeight(NamedTuple):
    """The right operand [K, N] of a product, or [E, K, N] of a grouped one, in e4m3, times its scales.

    Attributes:
        values: [N, K] e4m3, contiguous: the operand is its transpose; of experts [E, N, K].
        scale: [N / 128, K / 128] fp32, filled with zeros to a multiple of 4 columns; of experts [E, N]; [1] of a weight
            with one scale.
    """

    values: Tensor
    scale: Tensor


def cast_rows_reference(x: Tensor) -> ScaledRows:
    """Cast rows [R, K]."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    values, scale = _cast(blocks, blocks.abs(), (2,))
    return ScaledRows(values.flatten(1), scale.squeeze(2).t().contiguous().t())


def cast_weight_reference(weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
    """Cast a weight [O, I] for x [R, I] @ weight^T, and for dy [R, O] @ weight."""
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    values, scale = _cast(blocks, blocks.abs(), (1, 3))
    whole, scales = values.flatten(2, 3).flatten(0, 1), scale[:, 0, :, 0]
    return ScaledWeight(whole, _filled(scales)), ScaledWeight(whole.t().contiguous(), _filled(scales.t()))


def product_reference(x: Tensor, weight: ScaledWeight, cast: ScaledRows | None = None) -> Tensor:
    """Return x [R, K] times the weight, [R, N], by dequantized operands in the dtype of ``x``.

    cast: That of x, if the kernel that made x has cast it.
    """
    whole = weight.scale.dim() == 1
    cast = cast or (ScaledRows(*cast_tensor(x)) if whole else cast_rows_reference(x))
    return F.linear(dequantized(cast).to(x.dtype), dequantized(weight).to(x.dtype))


def dequantized(cast: ScaledRows | ScaledWeight) -> Tensor:
    """Return rows [R, K] or a weight [N, K] in fp32, which has room for all of its numbers."""
    values, scale = cast.values.float(), cast.scale
    if scale.dim() == 1:
        return values * scale
    wide = scale[:, : values.shape[1] // BLOCK].repeat_interleave(BLOCK, 1)
    return values * (wide.repeat_interleave(BLOCK, 0) if isinstance(cast, ScaledWeight) else wide)


def cast_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x with one scale, [1], on a GPU in Triton."""
    if triton_operators.usable(x.device):
        return triton_operators.cast_tensor(x.contiguous())
    if not x.numel():
        return x.to(E4M3), x.new_ones(1, dtype=torch.float32)
    values, scale = _cast(x.float(), x.float().abs(), tuple(range(x.dim())))
    return values, scale.view(1)


def cast_tensor_weight(weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
    """Cast a weight as ``cast_weight_reference`` does, with one scale."""
    values, scale = cast_tensor(weight)
    return ScaledWeight(values, scale), ScaledWeight(values.t().contiguous(), scale)


def swiglu_cast_reference(gate_up: Tensor, clamped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return swiglu, plain or clamped, of gate_up [.., 2, F], and its cast [R, F]; no gradient."""
    y = (clamped_swiglu_reference if clamped else swiglu_reference)(gate_up)
    return y, *cast_rows_reference(y.flatten(0, -2))


def swiglu_cast_backward_reference(dy: Tensor, gate_up: Tensor, clamped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of gate_up for that of ``swiglu_cast_reference``, and its cast [R, 2 F]."""
    with torch.enable_grad():
        leaf = gate_up.detach().requires_grad_()
        y = (clamped_swiglu_reference if clamped else swiglu_reference)(leaf)
    (gradient,) = torch.autograd.grad(y, leaf, dy)
    return gradient, *cast_rows_reference(gradient.flatten(-2).flatten(0, -2))


def norm_cast_reference(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the RMS norm of x [.., H], and its cast, which has no gradient."""
    y = rms_norm_reference(x, weight, epsilon)
    return y, *cast_rows_reference(y.detach().flatten(0, -2))


def norm_cast_cuda(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``norm_cast_reference`` by one kernel, in Triton, and its gradient by torch's."""
    return _NormCast.apply(x, weight, epsilon)


class _NormCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        y, root, values, scale = triton_operators.norm_cast(x, weight, epsilon)
        ctx.save_for_backward(x, weight, root)
        ctx.mark_non_differentiable(values, scale)
        ctx.set_materialize_grads(False)  # no zeros for those of the cast
        return y, values, scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight, root), needed = ctx.saved_tensors, list(ctx.needs_input_grad[:2])
        backward = torch.ops.aten._fused_rms_norm_backward
        return *backward(grads[0].contiguous(), x, x.shape[-1:], root, weight, needed), None


def cast_whole_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast rows [.., K] with a scale each, on a GPU in Triton; return the values and the scales [..]."""
    if triton_operators.usable(x.device):
        values, scale = triton_operators.cast_whole_rows(x.contiguous().view(-1, x.shape[-1]))
        return values.view(x.shape), scale.view(x.shape[:-1])
    values, scale = _cast(x.float(), x.float().abs(), (-1,))
    return values, scale.squeeze(-1)


def cast_experts(weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
    """Cast weights [E, O, I] for the products of rows [R, I] with their transposes, and of gradients with them."""
    turned = weight.transpose(1, 2).contiguous()
    return ScaledWeight(*cast_whole_rows(weight)), ScaledWeight(*cast_whole_rows(turned))


def grouped_product_reference(rows: Tensor, weight: ScaledWeight, counts: Tensor) -> Tensor:
    """Return each row [R, K] times the weight of its expert, [R, N], by dequantized operands. counts: [E], sum R."""
    values, scale = cast_whole_rows(rows)
    x, w = values.float() * scale[:, None], weight.values.float() * weight.scale[..., None]
    return grouped_linear_reference(x.to(rows.dtype), w.to(rows.dtype), counts)


def grouped_product_cuda(rows: Tensor, weight: ScaledWeight, counts: Tensor) -> Tensor:
    """Compute ``grouped_product_reference`` in fp8. Raises RuntimeError on a GPU without grouped products in fp8."""
    if not rows.shape[0]:
        return rows.new_empty(0, weight.values.shape[1])
    values, scale = cast_whole_rows(rows)
    operands = values, weight.values.transpose(1, 2), scale, weight.scale
    return torch._scaled_grouped_mm(*operands, offs=row_ends(counts), out_dtype=rows.dtype)


def cast_rows_cuda(x: Tensor) -> ScaledRows:
    """Compute ``cast_rows_reference`` in one pass, in Triton; without it, by the reference's operators."""
    if not triton_operators.usable(x.device):
        return cast_rows_reference(F.pad(x, (0, 0, 0, -x.shape[0] % triton_operators.FP8_ROWS)))
    values, scale = triton_operators.cast_rows(x if x.stride(1) == 1 else x.contiguous())
    return ScaledRows(values, scale.t())


def cast_weight_cuda(weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
    """Compute ``cast_weight_reference`` by one kernel, in Triton; without it, by the reference's operators."""
    if not triton_operators.usable(weight.device):
        return cast_weight_reference(weight)
    values, scale, turned, turned_scale = triton_operators.cast_weight(weight.contiguous())
    return ScaledWeight(values, scale), ScaledWeight(turned, turned_scale)


def product_cuda(x: Tensor, weight: ScaledWeight, cast: ScaledRows | None = None) -> Tensor:
    """Compute ``product_reference`` in fp8. Raises RuntimeError on a GPU without these scales."""
    rows, N = x.shape[0], weight.values.shape[0]
    if not rows:
        return x.new_empty(0, N)
    if weight.scale.dim() == 1:
        kinds, cast = (F.ScalingType.TensorWise, F.ScalingType.TensorWise), ScaledRows(*cast_tensor(x))
    else:
        kinds, cast = (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128), cast or cast_rows_cuda(x)
    right = weight.values.t(), weight.scale.t()
    y: Tensor = F.scaled_mm(cast.values, right[0], cast.scale, kinds[0], right[1], kinds[1], output_dtype=x.dtype)
    return y[:rows]


def _cast(blocks: Tensor, sizes: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return fp32 blocks in e4m3, and the scale of each, with ``dims`` of size 1. sizes: Absolute values."""
    finite = sizes < torch.inf
    bits = torch.where(finite, sizes, 0.0).amax(dims, keepdim=True).view(torch.int32)
    exponent = (((bits + _HALF_ABOVE) >> 23) - 8).clamp(min=1)
    scale, inverse = ((biased << 23).view(torch.float32) for biased in (exponent, 254 - exponent))
    return torch.where(finite, blocks * inverse, torch.nan).to(E4M3), scale


def _filled(scale: Tensor) -> Tensor:
    return F.pad(scale, (0, -scale.shape[1] % SCALES_TOGETHER)).contiguous()
