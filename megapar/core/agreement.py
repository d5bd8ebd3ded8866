"""What ranks tell each other between steps: numbers and short texts, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megapar.core.axis import Axis

TEXT_BYTES = 512


def numbers_of_all(numbers: Sequence[int], axis: Axis, device: torch.device) -> list[list[int]]:
    """By rank of the axis the numbers that it gives, as many on every rank, each an int64."""
    if axis.group is None:
        return [list(numbers)]
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(everyone, own, group=axis.group)
    rows: list[list[int]] = torch.stack(everyone).tolist()
    return rows


def texts_of_all(text: str, axis: Axis, device: torch.device) -> list[str]:
    """By rank of the axis the text that it gives, cut after ``TEXT_BYTES`` of UTF-8."""
    own = list(text.encode()[:TEXT_BYTES])
    rows = numbers_of_all([len(own), *own, *[0] * (TEXT_BYTES - len(own))], axis, device)
    return [bytes(row[1 : 1 + row[0]]).decode(errors="ignore") for row in rows]
