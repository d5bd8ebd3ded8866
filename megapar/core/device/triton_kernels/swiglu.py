"""Swiglu of rows, multiplied by a weight per row if there are weights: one pass in each direction.

Every step is rounded to the dtype of the rows, in the order of the operators that the kernels replace, except for the
gradient of a weight, which is summed in fp32 by one program per row, so that it repeats.

Shape letters: R rows, F features.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 1024
ELEMENTS_OF_A_WARP = 256  # eight of a thread: 16 bytes of a 16-bit dtype


@triton.jit
def _rounded(x, like):  # type: ignore[no-untyped-def]
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _forward(rows, weights, result, F: tl.constexpr, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    line = rows + row * 2 * F
    if WEIGHED:
        weight = _rounded(tl.load(weights + row), rows)
    for start in range(0, F, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < F
        gate = tl.load(line + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + F + offsets, mask=inside, other=0.0).to(tl.float32)
        y = _rounded(gate / (1.0 + tl.exp(-gate)), rows) * up
        if WEIGHED:
            y = _rounded(y, rows) * weight
        tl.store(result + row * F + offsets, y.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gradient, rows, weights, d_rows, d_weights, F: tl.constexpr, BLOCK: tl.constexpr, WEIGHED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    line = rows + row * 2 * F
    place = d_rows + row * 2 * F
    total = tl.zeros((BLOCK,), tl.float32)
    if WEIGHED:
        weight = _rounded(tl.load(weights + row), rows)
    for start in range(0, F, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < F
        gate = tl.load(line + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + F + offsets, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(gradient + row * F + offsets, mask=inside, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        activated = _rounded(gate / (1.0 + tl.exp(-gate)), rows)
        if WEIGHED:
            total += d * _rounded(activated * up, rows)
            d = _rounded(d * weight, rows)
        d_gate = _rounded(d * up, rows) * share * (1.0 + gate * (1.0 - share))
        tl.store(place + offsets, d_gate.to(rows.dtype.element_ty), mask=inside)
        tl.store(place + F + offsets, (d * activated).to(rows.dtype.element_ty), mask=inside)
    if WEIGHED:
        tl.store(d_weights + row, tl.sum(total, 0).to(d_weights.dtype.element_ty))


def swiglu(rows: Tensor, weights: Tensor | None, result: Tensor) -> None:
    """Compute silu(gate) * up, times the weights, [R, F].

    Args:
        rows: Gate, then up, [R, 2 F], contiguous, at most fp32.
        weights: [R], contiguous; None: no weights.
    """
    R, F = rows.shape[0], rows.shape[1] // 2
    if R:
        _forward[(R,)](rows, rows if weights is None else weights, result, **_sizes(F), WEIGHED=weights is not None)


def swiglu_backward(gradient: Tensor, rows: Tensor, weights: Tensor | None, results: tuple[Tensor, Tensor]) -> None:
    """Compute the gradients of the rows, [R, 2 F], and of the weights, [R], which is empty without weights.

    gradient: [R, F], contiguous, in the dtype of the rows.
    """
    R, F = gradient.shape
    if R:
        given = rows if weights is None else weights
        _backward[(R,)](gradient, rows, given, *results, **_sizes(F), WEIGHED=weights is not None)


def _sizes(F: int) -> dict[str, int]:
    block = min(LARGEST_BLOCK, triton.next_power_of_2(F))
    return {"F": F, "BLOCK": block, "num_warps": max(1, block // ELEMENTS_OF_A_WARP)}
