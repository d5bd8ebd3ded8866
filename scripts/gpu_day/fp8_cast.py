"""Cast of rows to e4m3 with a scale per 128 features, a power of two: one pass, in Triton.

The scale of a block is the smallest power of two by which its largest number becomes at most 448. Dividing by it
is exact, and it depends on no other rank as long as shards are multiples of 128 features.

Shape letters: R rows, K features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
ROWS, WARPS = 16, 4  # of a program


@triton.jit
def _cast(x, result, scales, R, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    inside = (row < R)[:, None]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(values), 1), 1e-30)  # a block of zeros has a scale, too
    # The next power of two: a mantissa that is not zero carries into the exponent.
    exponent = ((most * (1.0 / 448.0)).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(result + place, (values * inverse[:, None]).to(result.dtype.element_ty), mask=inside)
    tl.store(scales + tl.program_id(1).to(tl.int64) * R + row, scale, mask=row < R)


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [R, K] and scales [R, K / 128], of which the rows are together in memory, as the product takes them.

    Args:
        x: [R, K], contiguous; K is a multiple of 128.
    """
    rows, features = x.shape
    result = torch.empty(rows, features, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(features // BLOCK, rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, ROWS), features // BLOCK)
    _cast[grid](x, result, scales, rows, features, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)
    return result, scales.t()
