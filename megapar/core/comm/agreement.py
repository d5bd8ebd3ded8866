"""Small tensors, integers and short texts that ranks exchange between steps, for logs, guards and evaluations.

Each exchange is noted in the flight recorder under its purpose. Its bytes are not counted. On an axis of one rank
nothing is exchanged. Every rank of the axis must call the same functions in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.axis import Axis

TEXT_BYTES = 512


def reduce_numbers(
    x: Tensor, axis: Axis, purpose: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, async_op: bool = False
) -> dist.Work | None:
    """All-reduce ``x`` in place. Returns the work handle if ``async_op``; None if ``x`` is already reduced."""
    if axis.group is None:
        return None
    axis.note(purpose)
    return dist.all_reduce(x, op=op, group=axis.group, async_op=async_op)


def gather_numbers(x: Tensor, axis: Axis, purpose: str) -> list[Tensor]:
    """All-gather a tensor of one shape from every rank of the axis, in rank order."""
    if axis.group is None:
        return [x]
    axis.note(purpose)
    gathered = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(gathered, x, group=axis.group)
    return gathered


def numbers_of_all(numbers: Sequence[int], axis: Axis, device: torch.device) -> list[list[int]]:
    """All-gather int64 numbers, the same count from every rank. Returns one list per rank of the axis."""
    if axis.group is None:
        return [list(numbers)]
    x = torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.stack(gather_numbers(x, axis, "numbers")).tolist()


def texts_of_all(text: str, axis: Axis, device: torch.device) -> list[str]:
    """All-gather a text from every rank, truncated to ``TEXT_BYTES`` of UTF-8. Returns one per rank of the axis."""
    encoded = list(text.encode()[:TEXT_BYTES])
    rows = numbers_of_all([len(encoded), *encoded, *[0] * (TEXT_BYTES - len(encoded))], axis, device)
    return [bytes(row[1 : 1 + row[0]]).decode(errors="ignore") for row in rows]
