"""Casts to fp8 (e4m3) with a scale per block, and matrix products of what they return.

    rows of an input or a gradient [R, K]   a scale for every 128 features of a row    torch's BlockWise1x128
    weight [N, K]                           a scale for every 128 x 128 block          BlockWise128x128
    rows of experts [R, K], [E, N, K]       a scale for every row                      RowWise

The last is what torch has for grouped products on Hopper. K is contracted. A scale is the smallest power of two by
which the largest number that it belongs to becomes at most 448, the largest e4m3 number, so that dividing by it is
exact. Where ranks cut features at multiples of 128, and those of experts not at all, every scale depends on numbers of
one rank only. A number that is not finite becomes NaN, and the scale is that of the others.

The reference multiplies the dequantized operands in their dtype, which emulates the hardware exactly but for the order
of its sums. GPUs accumulate in fp32.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device import triton_operators
from megapar.core.device.grouped import grouped_linear_reference, row_ends

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128
SCALES_TOGETHER = 4  # a weight's scales of consecutive features are filled up to a multiple of this
_HALF_ABOVE = 0x1FFFFF  # added to the bits of fp32, it carries into the exponent from above 1.75 = 448 / 2^8 on


class ScaledRows(NamedTuple):
    """Rows in e4m3, times their scales.

    Attributes:
        values: [R, K] e4m3; on GPUs rows of zeros follow, up to a multiple of 16.
        scale: [R, K / 128] fp32, of which the rows are together in memory.
    """

    values: Tensor
    scale: Tensor


class ScaledWeight(NamedTuple):
    """The right operand [K, N] of a product, or [E, K, N] of a grouped one, in e4m3, times its scales.

    Attributes:
        values: [N, K] e4m3, contiguous: the operand is its transpose; of experts [E, N, K].
        scale: [N / 128, K / 128] fp32, filled with zeros to a multiple of 4 columns; of experts [E, N].
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


def product_reference(x: Tensor, weight: ScaledWeight) -> Tensor:
    """Return x [R, K] times the weight, [R, N], by dequantized operands in the dtype of ``x``."""
    values, scale = cast_rows_reference(x)
    rows = (values.float().unflatten(1, (-1, BLOCK)) * scale[:, :, None]).flatten(1)
    return F.linear(rows.to(x.dtype), dequantized(weight).to(x.dtype))


def dequantized(weight: ScaledWeight) -> Tensor:
    """Return [N, K] in fp32, which has room for all of its numbers."""
    values, K = weight.values.float(), weight.values.shape[1]
    wide = weight.scale[:, : K // BLOCK].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values * wide


def cast_whole_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast rows [.., K] with a scale each; return the values and the scales [..]."""
    values, scale = _cast(x.float(), x.float().abs(), (-1,))
    return values, scale.squeeze(-1)


def cast_experts_reference(weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
    """Cast weights [E, O, I] for the products of rows [R, I] with their transposes, and of gradients with them."""
    turned = weight.transpose(1, 2).contiguous()
    return ScaledWeight(*cast_whole_rows_reference(weight)), ScaledWeight(*cast_whole_rows_reference(turned))


def grouped_product_reference(rows: Tensor, weight: ScaledWeight, counts: Tensor) -> Tensor:
    """Return each row [R, K] times the weight of its expert, [R, N], by dequantized operands. counts: [E], sum R."""
    values, scale = cast_whole_rows_reference(rows)
    x, w = values.float() * scale[:, None], weight.values.float() * weight.scale[..., None]
    return grouped_linear_reference(x.to(rows.dtype), w.to(rows.dtype), counts)


def cast_whole_rows_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``cast_whole_rows_reference`` in Triton; without it, by the reference's operators."""
    if not triton_operators.usable(x.device):
        return cast_whole_rows_reference(x)
    values, scale = triton_operators.cast_whole_rows(x.contiguous().view(-1, x.shape[-1]))
    return values.view(x.shape), scale.view(x.shape[:-1])


def cast_experts_cuda(weight: Tensor) -> tuple[ScaledWeight, ScaledWeight]:
    """Compute ``cast_experts_reference`` in Triton."""
    turned = weight.transpose(1, 2).contiguous()
    return ScaledWeight(*cast_whole_rows_cuda(weight)), ScaledWeight(*cast_whole_rows_cuda(turned))


def grouped_product_cuda(rows: Tensor, weight: ScaledWeight, counts: Tensor) -> Tensor:
    """Compute ``grouped_product_reference`` in fp8. Raises RuntimeError on a GPU without grouped products in fp8."""
    if not rows.shape[0]:
        return rows.new_empty(0, weight.values.shape[1])
    values, scale = cast_whole_rows_cuda(rows)
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


def product_cuda(x: Tensor, weight: ScaledWeight) -> Tensor:
    """Compute ``product_reference`` in fp8. Raises RuntimeError on a GPU without these scales."""
    rows, N = x.shape[0], weight.values.shape[0]
    if not rows:
        return x.new_empty(0, N)
    kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    values, scale = cast_rows_cuda(x)
    y: Tensor = F.scaled_mm(
        values, weight.values.t(), scale, kinds[0], weight.scale.t(), kinds[1], output_dtype=x.dtype
    )
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
