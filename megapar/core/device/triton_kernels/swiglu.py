"""Swiglu of rows, plain or clamped, multiplied by a weight per row if there are weights: one pass in each direction.

The clamped form is in fp32 and rounded once. Of the plain one every step is rounded to the dtype of the rows, in the
order of the operators that the kernels replace. The gradient of a weight is summed in fp32 by one program per row, so
that it repeats.

Shape letters: R rows, F features.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 1024
LIMIT, SLOPE = tl.constexpr(7.0), tl.constexpr(1.702)  # as in ``layer_ops.clamped_swiglu``
ELEMENTS_OF_A_WARP = 256  # eight of a thread: 16 bytes of a 16-bit dtype


@triton.jit
def _rounded(x, like):  # type: ignore[no-untyped-def]
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    rows, weights, result, F: tl.constexpr, BLOCK: tl.constexpr, WEIGHED: tl.constexpr, CLAMPED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    line = rows + row * 2 * F
    if WEIGHED:
        weight = tl.load(weights + row).to(tl.float32)
        if not CLAMPED:
            weight = _rounded(weight, rows)
    for start in range(0, F, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < F
        gate = tl.load(line + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + F + offsets, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            gate = tl.minimum(gate, LIMIT)
            y = (tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0) * gate / (1.0 + tl.exp(-(gate * SLOPE)))
        else:
            y = _rounded(gate / (1.0 + tl.exp(-gate)), rows) * up
        if WEIGHED:
            if not CLAMPED:
                y = _rounded(y, rows)
            y = y * weight
        tl.store(result + row * F + offsets, y.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gradient,
    rows,
    weights,
    d_rows,
    d_weights,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = rows + row * 2 * F
    place = d_rows + row * 2 * F
    total = tl.zeros((BLOCK,), tl.float32)
    if WEIGHED:
        weight = tl.load(weights + row).to(tl.float32)
        if not CLAMPED:
            weight = _rounded(weight, rows)
    for start in range(0, F, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < F
        gate = tl.load(line + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + F + offsets, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(gradient + row * F + offsets, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            low, more = tl.minimum(gate, LIMIT), tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1.0
            share = 1.0 / (1.0 + tl.exp(-(low * SLOPE)))
            activated = low * share
            if WEIGHED:
                total += d * activated * more
                d = d * weight
            d_gate = tl.where(gate <= LIMIT, d * more * share * (1.0 + low * SLOPE * (1.0 - share)), 0.0)
            d_up = tl.where(tl.abs(up) <= LIMIT, d * activated, 0.0)
        else:
            share = 1.0 / (1.0 + tl.exp(-gate))
            activated = _rounded(gate / (1.0 + tl.exp(-gate)), rows)
            if WEIGHED:
                total += d * _rounded(activated * up, rows)
                d = _rounded(d * weight, rows)
            d_gate = _rounded(d * up, rows) * share * (1.0 + gate * (1.0 - share))
            d_up = d * activated
        tl.store(place + offsets, d_gate.to(rows.dtype.element_ty), mask=inside)
        tl.store(place + F + offsets, d_up.to(rows.dtype.element_ty), mask=inside)
    if WEIGHED:
        tl.store(d_weights + row, tl.sum(total, 0).to(d_weights.dtype.element_ty))


def swiglu(rows: Tensor, weights: Tensor | None, clamped: bool, result: Tensor) -> None:
    """Compute silu(gate) * up, or the clamped swiglu, times the weights, [R, F].

    Args:
        rows: Gate, then up, [R, 2 F], contiguous, at most fp32.
        weights: [R], contiguous; None: no weights.
    """
    R, F = rows.shape[0], rows.shape[1] // 2
    if R:
        given = rows if weights is None else weights
        _forward[(R,)](rows, given, result, **_sizes(F), WEIGHED=weights is not None, CLAMPED=clamped)


def swiglu_backward(
    gradient: Tensor, rows: Tensor, weights: Tensor | None, clamped: bool, results: tuple[Tensor, Tensor]
) -> None:
    """Compute the gradients of the rows, [R, 2 F], and of the weights, [R], which is empty without weights.

    gradient: [R, F], contiguous, in the dtype of the rows.
    """
    R, F = gradient.shape
    if R:
        given = rows if weights is None else weights
        form = {"WEIGHED": weights is not None, "CLAMPED": clamped}
        _backward[(R,)](gradient, rows, given, *results, **_sizes(F), **form)


def _sizes(F: int) -> dict[str, int]:
    block = min(LARGEST_BLOCK, triton.next_power_of_2(F))
    return {"F": F, "BLOCK": block, "num_warps": max(1, block // ELEMENTS_OF_A_WARP)}
