"""Small numbers that ranks exchange between steps, for logs, guards and evaluations, and short texts.

Each exchange is noted in the flight recorder under its purpose. Its bytes are not counted, and on an axis of one rank
there is none. Every rank of the axis calls the same function, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.axis import Axis

TEXT_BYTES = 512


def reduce_numbers(
    x: Tensor,
    axis: Axis,
    purpose: str,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """All-reduce ``x`` in place. Returns what to wait for where ``async_op``, None where ``x`` is reduced."""
    if axis.group is None:
        return None
    axis.note(purpose)
    return dist.all_reduce(x, op=op, group=axis.group, async_op=async_op)  # type: ignore[no-any-return]


def gather_numbers(own: Tensor, axis: Axis, purpose: str) -> list[Tensor]:
    """All-gather a tensor of one shape from every rank of the axis, in rank order."""
    if axis.group is None:
        return [own]
    axis.note(purpose)
    everyone = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(everyone, own, group=axis.group)
    return everyone


def numbers_of_all(numbers: Sequence[int], axis: Axis, device: torch.device) -> list[list[int]]:
    """All-gather numbers, as many from every rank, each an int64; by rank of the axis."""
    if axis.group is None:
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    rows: list[list[int]] = torch.stack(gather_numbers(own, axis, "numbers")).tolist()
    return rows


def texts_of_all(text: str, axis: Axis, device: torch.device) -> list[str]:
    """All-gather a text from every rank, cut after ``TEXT_BYTES`` of UTF-8; by rank of the axis."""
    own = list(text.encode()[:TEXT_BYTES])
    rows = numbers_of_all([len(own), *own, *[0] * (TEXT_BYTES - len(own))], axis, device)
    return [bytes(row[1 : 1 + row[0]]).decode(errors="ignore") for row in rows]
