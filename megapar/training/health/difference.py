"""What ranks say of runs that should have given the same bits, and whom they name."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from megapar.core.comm.agreement import numbers_of_all, texts_of_all
from megapar.core.comm.world import World
from megapar.core.health.trail import DigestPoint

SHOWN = 4
ADVICE = (
    "A device or its memory computes wrongly: take it out of service, and resume from a checkpoint before this. "
    "If it is sound, its kernels do not repeat their results: --recompute-check-interval 0 goes on without the check."
)


def where(world: World) -> str:
    """This rank with its node and device, for a message."""
    number = world.launched[world.rank] if world.grid.world_size > 1 else 0
    return f"rank {number} on {socket.gethostname()}, {world.device.torch_device} ({world.device.name})"


class Named(NamedTuple):
    """Where results part first. text: for a message. ranks: of the world, that differ there. places: their names."""

    text: str
    ranks: tuple[int, ...]
    places: tuple[str, ...]


def first_over_ranks(place: DigestPoint | None, world: World) -> Named:
    """The earliest place over all ranks, and who differs there; nobody where no rank has one. Every rank calls it."""
    everyone, device = world.axis("world"), world.device.torch_device
    rows = numbers_of_all([1, 0, 0] if place is None else [0, place.phase, place.order], everyone, device)
    names = texts_of_all("" if place is None else place.name, everyone, device)
    nodes = texts_of_all(where(world), everyone, device)
    ranks = tuple(rank for rank, row in enumerate(rows) if row == min(rows) and not row[0])
    text = listed([f"{names[rank]} of {nodes[rank]}" for rank in ranks])
    return Named(text, ranks, tuple(dict.fromkeys(names[rank] for rank in ranks)))


def listed(texts: Sequence[str]) -> str:
    """Some of them, and how many more there are."""
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def suspects(wrong: Sequence[bool]) -> list[int]:
    """Of ranks in a ring, each of which ran its own micro-batch and the next rank's, those that must be at fault.

    wrong: by rank, whether the two results of its micro-batch differ. A faulty rank spoils its own and the next one's;
    where that singles out nobody, all that took part are returned.
    """
    ranks = len(wrong)
    both = [rank for rank in range(ranks) if wrong[rank] and wrong[(rank + 1) % ranks]]
    if both and ranks > 2:
        return both
    return sorted({rank for number in range(ranks) if wrong[number] for rank in (number, (number - 1) % ranks)})
