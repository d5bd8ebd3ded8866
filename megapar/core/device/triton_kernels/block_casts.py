"""Casts to e4m3 with a scale per block, a power of two: of rows by 128 features or whole, of weights by 128 x 128.

A tensor with one scale is read twice: all programs add to its maximum, which does not depend on their order.

An operand is read once from memory: maximum, scale and cast. A block of a weight, which is read again for the cast, is
in the cache by then. See ``core.device.fp8`` for the numbers.

Shape letters: R rows, K features, O out and I in features of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
ROWS, WARPS = 16, 4  # rows at a time
WHOLE_ROWS, WIDTH = 4, 512  # whole rows at a time, and features of them
NORM_WIDTH = 1024  # features of a row of a norm at a time
TENSOR_BLOCK = 4096  # elements of a program, for a tensor with one scale


@triton.jit
def _largest(values, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    sizes = tl.abs(values)
    return tl.max(tl.where(sizes < float("inf"), sizes, 0.0), dim)


@triton.jit
def _exponent(largest):  # type: ignore[no-untyped-def]
    # Above 1.75 = 448 / 2^8 the mantissa carries into the exponent.
    return tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)


@triton.jit
def _power(exponent):  # type: ignore[no-untyped-def]
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(values, inverse):  # type: ignore[no-untyped-def]
    # The hardware's cast would make 448 of infinity.
    return tl.where(tl.abs(values) < float("inf"), values * inverse, float("nan"))


@triton.jit
def cast_part(numbers, values, scales, start, end, K, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast WIDTH fp32 numbers, features ``start`` to ``end`` of this program's row of K, which is its number."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.reshape(numbers, (WIDTH // 128, 128))
    exponent = _exponent(_largest(blocks, 1))
    number = start // 128 + tl.arange(0, WIDTH // 128)
    column = number[:, None] * 128 + tl.arange(0, 128)[None, :]
    cast = _scaled(blocks, _power(254 - exponent)[:, None]).to(values.dtype.element_ty)
    tl.store(values + row * K + column, cast, mask=column < end)
    tl.store(scales + number.to(tl.int64) * tl.num_programs(0) + row, _power(exponent), mask=number * 128 < end)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, weight, y, root, values, scales, R, epsilon, H: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    end = tl.where(row < R, H, 0)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, H, WIDTH):
        column = start + tl.arange(0, WIDTH)
        some = tl.load(x + row * H + column, mask=column < end, other=0.0).to(tl.float32)
        total += some * some
    scale = 1.0 / tl.sqrt(tl.sum(total, 0) / H + epsilon)
    if row < R:
        tl.store(root + row, scale)
    for start in range(0, H, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < end
        some = tl.load(x + row * H + column, mask=inside, other=0.0).to(tl.float32)
        normed = some * scale * tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
        normed = normed.to(y.dtype.element_ty)
        tl.store(y + row * H + column, normed, mask=inside)
        cast_part(normed.to(tl.float32), values, scales, start, H, H, WIDTH)


@triton.jit
def _maximum(x, numbers, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    largest = _largest(tl.load(x + place, mask=place < N, other=0.0).to(tl.float32), 0)
    tl.atomic_max(numbers + 1, largest.to(tl.int32, bitcast=True))  # bits of positive numbers are ordered as these


@triton.jit
def _tensor(x, values, numbers, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exponent = _exponent(tl.load(numbers + 1))
    cast = _scaled(tl.load(x + place, mask=place < N, other=0.0).to(tl.float32), _power(254 - exponent))
    tl.store(values + place, cast.to(values.dtype.element_ty), mask=place < N)
    tl.store(numbers, exponent << 23)


@triton.jit
def _rows(x, result, scales, R, filled, stride, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = row.to(tl.int64)[:, None]
    values = tl.load(x + line * stride + column[None, :], mask=(row < R)[:, None], other=0.0).to(tl.float32)
    exponent = _exponent(_largest(values, 1))
    cast = _scaled(values, _power(254 - exponent)[:, None]).to(result.dtype.element_ty)
    tl.store(result + line * K + column[None, :], cast, mask=(row < filled)[:, None])
    tl.store(scales + tl.program_id(1).to(tl.int64) * filled + row, _power(exponent), mask=row < filled)


@triton.jit
def _whole_rows(x, result, scales, R, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = row.to(tl.int64)[:, None] * K
    largest = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        inside = (row < R)[:, None] & (column < K)
        values = tl.load(x + line + column, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _largest(values, 1))
    exponent = _exponent(largest)
    for start in range(0, K, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        inside = (row < R)[:, None] & (column < K)
        values = tl.load(x + line + column, mask=inside, other=0.0).to(tl.float32)
        cast = _scaled(values, _power(254 - exponent)[:, None]).to(result.dtype.element_ty)
        tl.store(result + line + column, cast, mask=inside)
    tl.store(scales + row, _power(exponent), mask=row < R)


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    weight,
    values,
    scales,
    turned,
    turned_scales,
    rows_of,  # O
    width,  # I
    scales_width,
    turned_width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    across = column.to(tl.int64)[None, :]
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, BLOCK, ROWS):
        row = (first + start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        largest = tl.maximum(largest, _largest(tl.load(weight + row * width + across).to(tl.float32), 0))
    exponent = _exponent(tl.max(largest, 0))
    for start in range(0, BLOCK, ROWS):
        row = (first + start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        block = tl.load(weight + row * width + across).to(tl.float32)
        cast = _scaled(block, _power(254 - exponent)).to(values.dtype.element_ty)
        tl.store(values + row * width + across, cast)
        tl.store(turned + across * rows_of + row, cast)
    tl.store(scales + tl.program_id(0) * scales_width + tl.program_id(1), _power(exponent))
    tl.store(turned_scales + tl.program_id(1) * turned_width + tl.program_id(0), _power(exponent))


def cast_rows(x: Tensor, results: tuple[Tensor, Tensor]) -> None:
    """Cast x [R, K], whose rows are contiguous, to values [R', K], with zeros after R, and scales [K / 128, R']."""
    (R, K), filled = x.shape, results[0].shape[0]
    if R:
        grid = (triton.cdiv(filled, ROWS), K // BLOCK)
        _rows[grid](x, *results, R, filled, x.stride(0), K, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)


def cast_whole_rows(x: Tensor, results: tuple[Tensor, Tensor]) -> None:
    """Cast x [R, K], contiguous, to values [R, K] and scales [R]."""
    R, K = x.shape
    if R:
        grid = (triton.cdiv(R, WHOLE_ROWS),)
        _whole_rows[grid](x, *results, R, K, ROWS=WHOLE_ROWS, WIDTH=WIDTH, num_warps=WARPS)


def cast_weight(weight: Tensor, results: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Cast a weight [O, I], contiguous, to values [O, I] and their scales, then to those of its transpose [I, O]."""
    O, I = weight.shape  # noqa: E741
    widths = results[1].shape[1], results[3].shape[1]
    grid = (O // BLOCK, I // BLOCK)
    _weight[grid](weight, *results, O, I, *widths, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)


def norm_cast(x: Tensor, weight: Tensor, epsilon: float, results: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Compute the RMS norm of x [R, K], contiguous, 1 / root of the mean of squares [R], and the cast of the norm."""
    (R, K), filled = x.shape, results[2].shape[0]
    if R:
        width = min(NORM_WIDTH, triton.next_power_of_2(K))
        _norm[(filled,)](x, weight, *results, R, epsilon, H=K, WIDTH=width, num_warps=WARPS)


def cast_tensor(x: Tensor, results: tuple[Tensor, Tensor]) -> None:
    """Cast x, contiguous, to values of its shape and [scale, maximum], which is zero before."""
    values, numbers = results
    if x.numel():
        grid, bits = (triton.cdiv(x.numel(), TENSOR_BLOCK),), numbers.view(torch.int32)
        _maximum[grid](x, bits, x.numel(), BLOCK=TENSOR_BLOCK, num_warps=WARPS)
        _tensor[grid](x, values, bits, x.numel(), BLOCK=TENSOR_BLOCK, num_warps=WARPS)
