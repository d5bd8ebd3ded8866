"""Comparison of the operators that order, copy and sum rows with their references: rows of experts, and of buckets.

Shape letters: T tokens, k choices per token, H hidden, E experts, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megapar.core.device.ops import OPS
from scripts.gpu_day.day import Answer, Day

EXPERT_ENTRIES = ("sort_pairs", "spread_pairs", "order_runs", "order_equal_runs", "pack", "unpack", "sum_message")
BUCKET_ENTRIES = ("pack_bucket", "unpack_bucket")
ENTRIES = EXPERT_ENTRIES + BUCKET_ENTRIES
T, K, H, E = 1000, 6, 200, 64
RUN = 30  # a run of rows is shorter
CAPACITY = 2 * T * K // E
RANKS, PADDING = 4, 8
SHAPES = ((64, 96), (3, 32, 40), (128,))  # cut along dims 0, 1 and 0
DIMS = (0, 1, 0)
Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def compare(day: Day, name: str, dtype: torch.dtype) -> Answer:
    """Count the unequal numbers of all calls of an entry; sums of rows may differ by roundings of the dtype."""
    if name in BUCKET_ENTRIES:
        return _compare_bucket(day, name, dtype)
    form, reference, differences = day.operator(name), OPS[name]["reference"], 0
    for arguments, more in calls(name, day.place, dtype):
        got, want = (_tensors(function(*arguments, **more)) for function in (form, reference))
        for a, b in zip(got, want, strict=True):
            tolerance = 2 * K * torch.finfo(dtype).eps if a.dtype == dtype else 0.0
            differences += int((~torch.isclose(a, b, rtol=tolerance, atol=tolerance)).sum())
    return Answer(not differences, {"different": differences})


def calls(name: str, place: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the arguments of the calls of an entry."""
    experts = torch.rand(T, E, device=place).topk(K).indices
    some = torch.rand(T, K, device=place) < 0.4
    counts = torch.randint(0, RUN, (1, 8, 8), device=place)
    x, weights = torch.randn(T, H, device=place).to(dtype), torch.rand(T * K, device=place)
    order = OPS["sort_pairs"]["reference"](experts, some, E, T * K, fill=True)
    columns = H + 16 // dtype.itemsize
    message = OPS["pack"]["reference"](x, weights, columns, order.pair, order.kept, K)
    if name == "sort_pairs":
        yield (experts, None, E, T * K), {}
        yield (experts, some, E, T * K), {"fill": True}
    elif name == "spread_pairs":
        yield (experts, some, E, CAPACITY), {}
    elif name == "order_runs":
        yield (counts, int(counts.sum()), int(counts.sum())), {}
        yield (counts.view(2, 4, 8), int(counts.sum()), int(counts.sum())), {}
    elif name == "order_equal_runs":
        yield (experts, 8, 8, 77), {}
    elif name == "pack":
        yield (x, weights, H + 4 // dtype.itemsize, order.pair, order.kept, K), {}
    elif name == "unpack":
        yield (message, H, torch.float32, order.row.flatten(), T * K), {"sort_weights": True}
        yield (message, H, torch.float32, None, T * K + 5), {"sort_weights": False}
    else:
        yield (message, H, torch.float32, order.row, some), {}


def _tensors(results: Any) -> list[Tensor]:
    """Return the results as tensors that can be compared; without the ends of rows, which a reference leaves out."""
    if isinstance(results, Tensor):
        return [results.nan_to_num()]
    return [x.nan_to_num() for x in tuple(results)[:4] if x is not None]


def _compare_bucket(day: Day, name: str, dtype: torch.dtype) -> Answer:
    """Count the numbers that differ after a copy into fp32 rows, or out of rows in ``dtype``."""
    tensors = [torch.randn(shape, device=day.place).to(dtype) for shape in SHAPES]
    columns = sum(tensor.numel() for tensor in tensors) // RANKS
    results = []
    for form in (day.operator(name), OPS[name]["reference"]):
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
