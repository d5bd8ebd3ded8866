"""Comparison of runs that should have given the same bits: the first difference, and the ranks at fault."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from megapar.core.comm.agreement import numbers_of_all, texts_of_all
from megapar.core.comm.world import World
from megapar.health.corruption.trail import DigestPoint

SHOWN = 4
ADVICE = (
    "A device or its memory is faulty: take it out of service, and resume from a checkpoint before this. "
    "If it is sound, its kernels are not deterministic: pass --recompute-check-interval 0 to train without the check."
)


def where(world: World) -> str:
    """Describe this rank with its node and device, for messages."""
    number = world.launched[world.rank] if world.grid.world_size > 1 else 0
    return f"rank {number} on {socket.gethostname()}, {world.device.torch_device} ({world.device.name})"


class FirstDifference(NamedTuple):
    """The first difference between results.

    Attributes:
        text: Description for messages.
        ranks: Global ranks that differ there.
        tensors: Names of the differing tensors.
    """

    text: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]


def first_over_ranks(point: DigestPoint | None, world: World) -> FirstDifference:
    """Return the earliest difference over all ranks, with the ranks that differ there. Every rank must call it."""
    everyone, device = world.axis("world"), world.device.torch_device
    rows = numbers_of_all([1, 0, 0] if point is None else [0, point.phase, point.order], everyone, device)
    names = texts_of_all("" if point is None else point.name, everyone, device)
    nodes = texts_of_all(where(world), everyone, device)
    ranks = tuple(rank for rank, row in enumerate(rows) if row == min(rows) and not row[0])
    text = listed([f"{names[rank]} of {nodes[rank]}" for rank in ranks])
    return FirstDifference(text, ranks, tuple(dict.fromkeys(names[rank] for rank in ranks)))


def listed(texts: Sequence[str]) -> str:
    """Join the first texts, and count the remaining ones."""
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def suspects(wrong: Sequence[bool]) -> list[int]:
    """Return the ranks at fault, in a ring where each rank ran its own micro-batch and the next rank's.

    A faulty rank spoils the results of both. If that does not identify single ranks, all ranks involved are returned.
    ``wrong`` has an entry per rank: True if the two results of its micro-batch differ.
    """
    ranks = len(wrong)
    both = [rank for rank in range(ranks) if wrong[rank] and wrong[(rank + 1) % ranks]]
    if both and ranks > 2:
        return both
    return sorted({rank for number in range(ranks) if wrong[number] for rank in (number, (number - 1) % ranks)})
