"""Placement of the experts of a layer on the ranks of ep, and its change by measured load.

A layer has E slots, E / ranks consecutive ones on each rank; a placement names the expert in each slot. By default
expert e is in slot e. Only the way of tokens and of weights depends on it: routers, losses and checkpoints number
experts as ever.

    loads of experts 0 to 3: 9 8 1 2      placement 0 1 | 2 3    two ranks with 17 and 3
                                                    3 1 | 2 0    10 and 10, two experts moved

Experts are only exchanged, so that every rank keeps its number of them, and those that no swap needs stay. A swap stays
within a class of slots (``PlacementRoom.block``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapar.core.device.base import Device

LEAST_LOAD_SHIFT = 0.05  # of the mean load of a rank: below this a layer's experts stay
LEAST_STEP = 0.005  # of the same: what one swap must gain


@dataclass(frozen=True)
class PlacementRoom:
    """The slots of a layer.

    Attributes:
        experts: E, the number of slots.
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
        """Return the block of a slot within its rank; experts may trade places only between slots of equal blocks."""
        return slot % self.local // self.block

    def fits(self, experts: Sequence[int]) -> bool:
        """Return True if these are the experts of all slots, each once and in the block of its number."""
        in_block = all(self.class_of(slot) == self.class_of(expert) for slot, expert in enumerate(experts))
        return sorted(experts) == list(range(self.experts)) and in_block


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
    """Return the load of the busiest rank, relative to the mean of all; 1 without load. experts: Those in each slot."""
    local, total = len(experts) // ranks, sum(loads)
    if not total:
        return 1.0
    by_rank = [sum(loads[expert] for expert in experts[r * local : (r + 1) * local]) for r in range(ranks)]
    return max(by_rank) * ranks / total


def rebalanced(loads: Sequence[float], experts: Sequence[int], room: PlacementRoom) -> tuple[int, ...]:
    """Return a placement with less load on the busiest node and rank, or the same one if there is little to gain.

    Deterministic: all ranks find the same one from the same loads, whole numbers. The busiest rank swaps the pair of
    experts, with any other rank, that leaves the least load on the busier of the two, until no swap gains anything.
    """
    placement, mean = list(experts), sum(loads) / room.ranks
    if room.node_ranks < room.ranks:
        _swap(loads, placement, range(room.experts), room.node_ranks * room.local, room.class_of)
    for first in range(0, room.experts, room.node_ranks * room.local):
        slots = range(first, first + room.node_ranks * room.local)
        _swap(loads, placement, slots, room.local, room.class_of)
    before, after = (_peaks(loads, placed, room) for placed in (experts, placement))
    gains = max(old - new for old, new in zip(before, after, strict=True)) >= LEAST_LOAD_SHIFT * mean > 0
    return tuple(placement) if gains else tuple(experts)


def _peaks(loads: Sequence[float], experts: Sequence[int], room: PlacementRoom) -> tuple[float, float]:
    """Return the load of the busiest rank, and that of the busiest node by rank."""
    ranks = [
        sum(loads[expert] for expert in experts[first : first + room.local])
        for first in range(0, room.experts, room.local)
    ]
    size = room.node_ranks
    return max(ranks), max(sum(ranks[first : first + size]) / size for first in range(0, room.ranks, size))


def _swap(
    loads: Sequence[float], placement: list[int], slots: range, size: int, class_of: Callable[[int], int]
) -> None:
    """Even out the groups of ``size`` consecutive slots by swaps, in place."""
    groups = [range(first, first + size) for first in range(slots.start, slots.stop, size)]
    totals = [sum(loads[placement[slot]] for slot in group) for group in groups]
    options = [_by_load(loads, placement, group, class_of) for group in groups]
    least = LEAST_STEP * sum(totals) / len(totals)
    while True:
        top = max(range(len(groups)), key=totals.__getitem__)
        best, swap = totals[top] - least, None
        for other, by_class in enumerate(options):
            if totals[other] >= best:
                continue
            half = (totals[top] - totals[other]) / 2
            for own_slot in groups[top]:
                load, same = loads[placement[own_slot]], by_class[class_of(own_slot)]
                at = bisect_left(same, (load - half, -1))  # the best partners are the nearest to this load
                for partner, their_slot in same[max(0, at - 1) : at + 1]:
                    peak = max(totals[top] - load + partner, totals[other] + load - partner)
                    if peak < best:
                        best, swap = peak, (own_slot, their_slot, other)
        if swap is None:
            return
        own_slot, their_slot, other = swap
        placement[own_slot], placement[their_slot] = placement[their_slot], placement[own_slot]
        for number in (top, other):
            totals[number] = sum(loads[placement[slot]] for slot in groups[number])
            options[number] = _by_load(loads, placement, groups[number], class_of)


def _by_load(
    loads: Sequence[float], experts: Sequence[int], slots: range, class_of: Callable[[int], int]
) -> dict[int, list[tuple[float, int]]]:
    """Return, for each class, (load of the expert, slot) in ascending order."""
    by_class: dict[int, list[tuple[float, int]]] = {}
    for slot in slots:
        by_class.setdefault(class_of(slot), []).append((loads[experts[slot]], slot))
    return {number: sorted(pairs) for number, pairs in by_class.items()}


class ExpertSlots:
    """The expert in each slot of a layer: expert e in slot e until ``set_order``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slot_E: Tensor | None = None  # of each expert, if they are not in order
        self._expert_E: Tensor | None = None  # in each slot

    def set_order(self, experts: Sequence[int]) -> None:
        """Set the expert in each of the E slots for later forwards; the caller has moved their weights."""
        self._slot_E = self._expert_E = None
        if list(experts) != sorted(experts):
            self._slot_E, self._expert_E = self._device.integers((slots_of(experts), experts)).unbind(0)

    def of(self, experts_Tk: Tensor, counts_kE: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the slots of these experts, and the counts by expert as counts by slot."""
        if self._slot_E is None or self._expert_E is None:
            return experts_Tk, counts_kE
        by_slot = None if counts_kE is None else counts_kE.index_select(1, self._expert_E)
        return self._slot_E[experts_Tk], by_slot
