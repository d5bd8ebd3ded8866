"""Placement of the experts of a layer on the ranks of ep, and its change by measured load.

A layer has E slots, E / ranks consecutive ones on each rank; a placement names the expert in each slot. By default
expert e is in slot e. Only the way of tokens and of weights depends on it: routers, losses and checkpoints number
experts as ever.

    loads of experts 0 to 3: 9 8 1 2      placement 0 1 | 2 3    two ranks with 17 and 3
                                                    3 1 | 2 0    10 and 10, two experts moved

Experts are swapped, so every rank keeps its number of them, and those that no swap needs stay. A swap stays within a
class of slots (``PlacementRoom.block``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_GAIN = 0.05  # of the mean load of a rank: below this a layer's experts stay
LEAST_STEP = 0.005  # of the same: what one swap must gain


@dataclass(frozen=True)
class PlacementRoom:
    """The slots of a layer.

    Attributes:
        experts: E, the number of slots.
        ranks: Ranks of ep.
        node_ranks: Ranks of ep on each node, if messages go to a node once; the loads of nodes are then evened out
            first. ``ranks`` otherwise.
        block: Slots of a rank whose experts have their optimizer state on the same shard: an expert stays in the block
            of its number on any rank, so that state moves between ranks of ep only. All slots of a rank if every shard
            has a part of each expert.
    """

    experts: int
    ranks: int
    node_ranks: int
    block: int

    @property
    def local(self) -> int:
        """Slots of each rank."""
        return self.experts // self.ranks

    def class_of(self, slot: int) -> int:
        """Return the block of a slot within its rank; experts are swapped between slots of equal blocks."""
        return slot % self.local // self.block

    def fits(self, experts: Sequence[int]) -> bool:
        """Return True if these are the experts of all slots, each once and in the block of its number."""
        own = all(self.class_of(slot) == self.class_of(expert) for slot, expert in enumerate(experts))
        return sorted(experts) == list(range(self.experts)) and own


def in_order(experts: int) -> tuple[int, ...]:
    """Return the default placement, expert e in slot e."""
    return tuple(range(experts))


def slots_of(experts: Sequence[int]) -> list[int]:
    """Return the slot of each expert, from the expert in each slot."""
    slots = [0] * len(experts)
    for slot, expert in enumerate(experts):
        slots[expert] = slot
    return slots


def busiest_rank(loads: Sequence[float], experts: Sequence[int], ranks: int) -> float:
    """Return the load of the busiest rank, relative to the mean of all; 1 without load.

    Args:
        loads: Load of each expert.
        experts: The expert in each slot.
        ranks: Ranks of ep.
    """
    local, total = len(experts) // ranks, sum(loads)
    if not total:
        return 1.0
    by_rank = [sum(loads[expert] for expert in experts[r * local : (r + 1) * local]) for r in range(ranks)]
    return max(by_rank) * ranks / total


def rebalanced(loads: Sequence[float], experts: Sequence[int], room: PlacementRoom) -> tuple[int, ...]:
    """Return a placement with less load on the busiest node and rank, or the same one if there is little to gain.

    Deterministic: all ranks find the same one from the same loads. The busiest rank swaps the pair of experts, with any
    other rank, that leaves the least load on the busier of the two, until no swap gains anything.

    Args:
        loads: Load of each expert, whole numbers.
        experts: The expert in each slot now.
        room: The slots.
    """
    found, mean = list(experts), sum(loads) / room.ranks
    if room.node_ranks < room.ranks:
        _swap(loads, found, range(room.experts), room.node_ranks * room.local, room.class_of)
    for first in range(0, room.experts, room.node_ranks * room.local):
        slots = range(first, first + room.node_ranks * room.local)
        _swap(loads, found, slots, room.local, room.class_of)
    before, after = (_peaks(loads, placed, room) for placed in (experts, found))
    gains = max(old - new for old, new in zip(before, after, strict=True)) >= LEAST_GAIN * mean > 0
    return tuple(found) if gains else tuple(experts)


def _peaks(loads: Sequence[float], experts: Sequence[int], room: PlacementRoom) -> tuple[float, float]:
    """Return the load of the busiest rank, and that of the busiest node by rank."""
    ranks = [
        sum(loads[expert] for expert in experts[first : first + room.local])
        for first in range(0, room.experts, room.local)
    ]
    size = room.node_ranks
    return max(ranks), max(sum(ranks[first : first + size]) / size for first in range(0, room.ranks, size))


def _swap(loads: Sequence[float], found: list[int], slots: range, size: int, class_of: Callable[[int], int]) -> None:
    """Even out the groups of ``size`` consecutive slots by swaps, in place."""
    groups = [range(first, first + size) for first in range(slots.start, slots.stop, size)]
    totals = [sum(loads[found[slot]] for slot in group) for group in groups]
    options = [_by_load(loads, found, group, class_of) for group in groups]
    least = LEAST_STEP * sum(totals) / len(totals)
    while True:
        top = max(range(len(groups)), key=totals.__getitem__)
        best, swap = totals[top] - least, None
        for other, by_class in enumerate(options):
            if totals[other] >= best:
                continue
            half = (totals[top] - totals[other]) / 2
            for mine in groups[top]:
                load, same = loads[found[mine]], by_class[class_of(mine)]
                at = bisect_left(same, (load - half, -1))  # the best partners are the nearest to this load
                for partner, theirs in same[max(0, at - 1) : at + 1]:
                    peak = max(totals[top] - load + partner, totals[other] + load - partner)
                    if peak < best:
                        best, swap = peak, (mine, theirs, other)
        if swap is None:
            return
        mine, theirs, other = swap
        found[mine], found[theirs] = found[theirs], found[mine]
        for number in (top, other):
            totals[number] = sum(loads[found[slot]] for slot in groups[number])
            options[number] = _by_load(loads, found, groups[number], class_of)


def _by_load(
    loads: Sequence[float], experts: Sequence[int], slots: range, class_of: Callable[[int], int]
) -> dict[int, list[tuple[float, int]]]:
    """Return, for each class, (load of the expert, slot) in ascending order."""
    found: dict[int, list[tuple[float, int]]] = {}
    for slot in slots:
        found.setdefault(class_of(slot), []).append((loads[experts[slot]], slot))
    return {number: sorted(pairs) for number, pairs in found.items()}
