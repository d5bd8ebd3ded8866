"""What a CPU keeps for what travels: the buffers of sharding's stages 1 and 2, replayed by size.

On a CPU they are not given back but used again (``core/buffers.py``), so that what counts is how many there are after
a step or two; which is used again for what follows from the order in which segments travel (``core/sharding/zero.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.planning.layout import Layout
from megapar.training.segments import ITEM_BYTES, make_segments

STEPS = 3  # until nothing is added


@dataclass(frozen=True)
class Traveling:
    """A segment. row: elements of one shard. item: bytes of an element of its parameters. replicated: over dp."""

    row: int
    shards: int
    item: int
    replicated: bool


class _Pool:
    """As ``BufferPool`` takes and gives, in bytes."""

    def __init__(self) -> None:
        self.total = 0
        self._free: list[int] = []

    def take(self, need: int) -> int:
        fitting = [size for size in self._free if need <= size <= 4 * need]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        self.total += need
        return need

    def give(self, size: int) -> None:
        self._free.append(size)


def pool_bytes(layout: Layout, stage: int, *, experts_only: bool = False) -> int:
    """All buffers of a stage's first rank. experts_only: those that stage 3 leaves to stage 2."""
    segments, sharding = segments_of(layout, stage, experts_only=experts_only), layout.config.sharding
    each = sharding.gradient_merge_mode == "micro_batch"
    reduce = layout.wide if layout.wide > 4 else ITEM_BYTES[sharding.grad_reduce_dtype]
    ahead = sharding.sharding_prefetch_segments if sharding.overlap_param_gather != "off" else 0
    replay = _Replay(segments, layout.wide, reduce)
    for _ in range(STEPS):
        replay.gather(ahead)
        for _ in range(layout.micro_batches if each else 1):
            replay.reduce(whole=not each)
        replay.begin_step()
    return replay.pool.total


def segments_of(layout: Layout, stage: int, *, experts_only: bool = False) -> list[Traveling]:
    """In forward order, cut as the run cuts them."""
    plan = make_segments(layout.config, layout.of or layout.config.model)
    place = {name: number for number, planned in enumerate(plan) for name in planned.names}
    rows: dict[tuple[int, bool, bool], int] = {}
    found: dict[tuple[int, bool, bool], Traveling] = {}
    held = [spec for spec in layout.held(stage) if spec.trainable and (spec.expert or not experts_only)]
    for spec in sorted(held, key=lambda spec: place[spec.name]):
        key = place[spec.name], spec.fp32, spec.expert
        rows[key] = rows.get(key, 0) + layout.row_numel(spec)
        item = layout.wide if spec.fp32 else layout.item
        found[key] = Traveling(rows[key], layout.shards(spec), item, layout.replicas(spec) > 1)
    return list(found.values())


class _Replay:
    """The steps of a run, as far as they take and give buffers."""

    def __init__(self, segments: Sequence[Traveling], wide: int, reduce: int) -> None:
        self.pool = _Pool()
        self._segments, self._wide, self._reduce = segments, wide, reduce
        self._gradients: dict[int, int] = {}

    def begin_step(self) -> None:
        """The last step's gradients are not needed any more."""
        for number in range(len(self._segments)):
            if number in self._gradients:
                self.pool.give(self._gradients.pop(number))

    def gather(self, ahead: int) -> None:
        """New parameters, so many segments ahead of the one that is received."""
        flying: list[list[int]] = []
        for segment in self._segments:
            taken = []
            if segment.shards > 1 or segment.item != self._wide:
                taken.append(self.pool.take(segment.row * segment.item))
            if segment.shards > 1:
                taken.append(self.pool.take(segment.row * segment.shards * segment.item))
            flying.append(taken[::-1])
            if len(flying) > ahead:
                self._land(flying.pop(0))
        for taken in flying:
            self._land(taken)

    def _land(self, taken: Sequence[int]) -> None:
        for size in taken:
            self.pool.give(size)

    def reduce(self, *, whole: bool) -> None:
        """Gradients, the last segment's first; all are under way before the first is waited for, but for replicas."""
        flying: list[tuple[int, list[int], int, int]] = []
        for number in reversed(range(len(self._segments))):
            flying.append(self._launch(number, whole=whole))
            if len(flying) > 1 and self._segments[number + 1].replicated:
                self._settle(*flying.pop(0))
        for one in flying:
            self._settle(*one)

    def _launch(self, number: int, *, whole: bool) -> tuple[int, list[int], int, int]:
        """(segment, what is lent, the flat gradients, what arrives)."""
        segment = self._segments[number]
        elements = segment.row * segment.shards
        alone = segment.shards == 1
        main = self._wide if whole or alone else self._reduce
        if alone and number in self._gradients:
            flat = self._gradients.pop(number)
        else:
            flat = self.pool.take(elements * main)
        if alone:
            return number, [], flat, 0
        lent = [self.pool.take(elements * self._reduce) for _ in range(1 if main == self._reduce else 2)]
        return number, lent, flat, self.pool.take(segment.row * self._reduce)

    def _settle(self, number: int, lent: Sequence[int], flat: int, arrived: int) -> None:
        segment = self._segments[number]
        self._land(lent)
        if segment.shards == 1:
            self._gradients[number] = flat
            return
        self.pool.give(flat)
        if number not in self._gradients and self._reduce == self._wide:
            self._gradients[number] = arrived
            return
        if number not in self._gradients:
            self._gradients[number] = self.pool.take(segment.row * self._wide)
        self.pool.give(arrived)
