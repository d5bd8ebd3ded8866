"""Comparison of the copies between parameters and the rows of a sharding bucket with their references, bit for bit."""

from __future__ import annotations

import torch

from megapar.core.device.ops import OPS
from scripts.gpu_day.day import Answer, Day

ENTRIES = ("pack_bucket", "unpack_bucket")
RANKS, PADDING = 4, 8
SHAPES = ((64, 96), (3, 32, 40), (128,))  # cut along dims 0, 1 and 0
DIMS = (0, 1, 0)


@torch.no_grad()
def compare(day: Day, name: str, dtype: torch.dtype) -> Answer:
    """Count the numbers that differ after a copy into fp32 rows, or out of rows in ``dtype``."""
    tensors = [torch.randn(shape, device=day.place).to(dtype) for shape in SHAPES]
    columns = sum(tensor.numel() for tensor in tensors) // RANKS
    forms = OPS[name]
    results = []
    for form in (forms.get(day.device, forms["reference"]), forms["reference"]):
        copies = [tensor.clone() for tensor in tensors]
        if name == "pack_bucket":
            rows = torch.zeros(RANKS, columns + PADDING, device=day.place)
            form(rows, copies, DIMS)
            results.append([rows[:, :columns]])
        else:
            rows = torch.arange(RANKS * (columns + PADDING), device=day.place).to(dtype).view(RANKS, -1)
            form(rows, copies, DIMS)
            results.append(copies)
    different = sum(int((a != b).sum()) for a, b in zip(*results, strict=True))
    return Answer(not different, {"different": different})
