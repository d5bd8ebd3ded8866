"""Weights stored in FP8 (e4m3) by blocks of 128 x 128, as DeepSeek-V3 and Kimi-K2 publish them.

    weight [R, C] in float8_e4m3fn | weight_scale_inv [ceil(R / 128), ceil(C / 128)] in float32: value = weight * scale

Blocks at the lower and right edges are smaller. Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.box import Box
from megapar.model.published_tensors import BLOCK


def stored_rows(region: Box, part: Box) -> Tensor:
    """Return the rows of the stored matrix [R, C] that ``part`` of ``region`` [.., C] consists of, flattened.

    Args:
        region: Place of the stored matrix in its parameter; its leading dims are the rows.
        part: A box within ``region``.
    """
    rows = torch.zeros((), dtype=torch.int64)
    dims = zip(region.offsets[:-1], region.sizes[:-1], part.offsets[:-1], part.sizes[:-1], strict=True)
    for start, size, first, count in dims:
        rows = rows.unsqueeze(-1) * size + torch.arange(first - start, first - start + count)
    return rows.flatten()


def dequantized(values: Tensor, scales: Tensor, rows: Tensor, column: int) -> Tensor:
    """Return values * scales in float32, in the shape of ``values``.

    Args:
        values: Rows of the stored matrix in FP8, [.., C'].
        scales: All scales of the stored matrix in float32.
        rows: The stored row of each row of ``values``, flattened.
        column: The stored column of the first column of ``values``.
    """
    wide = values.to(torch.float32)
    flat = wide.view(-1, values.shape[-1]) if values.dim() > 1 else wide.view(1, -1)
    of_rows = scales[rows // BLOCK]
    first, end = column, column + flat.shape[1]
    for block in range(first // BLOCK, -(-end // BLOCK)):
        low, high = max(block * BLOCK, first) - first, min((block + 1) * BLOCK, end) - first
        flat[:, low:high].mul_(of_rows[:, block, None])
    return wide
