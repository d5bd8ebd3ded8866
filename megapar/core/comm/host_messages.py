"""Blocking messages of host tensors between ranks, for checkpoints and exports. Training steps do not use them.

Their bytes are not counted, and the flight recorder does not note them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def send(x: Tensor, to: int, group: dist.ProcessGroup | None = None) -> None:
    """Send ``x`` to a global rank. ``group``: None for all ranks."""
    dist.send(x, to, group=group)


def receive(x: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``x`` with the message of a global rank. ``group``: None for all ranks."""
    dist.recv(x, source, group=group)


def send_receive(
    out: Tensor | None, back: Tensor | None, to: int | None, source: int | None, group: dist.ProcessGroup | None
) -> None:
    """Send ``out`` to a rank while ``back`` is received from another. None skips either."""
    works = []
    if out is not None:
        works.append(dist.isend(out, to, group=group))
    if back is not None:
        works.append(dist.irecv(back, source, group=group))
    for work in works:
        assert work is not None
        work.wait()


def true_for_all(value: bool, group: dist.ProcessGroup | None) -> bool:
    """Return True if ``value`` is true on every rank of the group. Without a group, returns it."""
    votes = torch.tensor([int(value)])
    if group is not None:
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
