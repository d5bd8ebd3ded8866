"""The communication buffers that a CPU keeps under sharding's stages 1 and 2, replayed by size.

On a CPU they are not freed but reused (``core/comm/buffers.py``), so that the number of buffers after a step or two
counts.
The order in which segments are sent (``core/sharding/zero.py``) decides which buffer serves again for what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.planning.planned_run import PlannedRun
from megapar.training.building.segments import make_segments

STEPS = 3  # until nothing is added


@dataclass(frozen=True)
class Traveling:
    """A segment.

    Attributes:
        row: Elements of one shard.
        shards: Ranks that share it.
        item: Bytes of an element of its parameters.
        replicated: Replicas over dp repeat it.
    """

    row: int
    shards: int
    item: int
    replicated: bool


class _Pool:
    """Takes and gives as ``BufferPool`` does, in bytes."""

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


def pool_bytes(run: PlannedRun, stage: int, *, experts_only: bool = False) -> int:
    """Bytes of all buffers of a stage's first rank. experts_only: those that stage 3 leaves to stage 2."""
    segments, sharding = segments_of(run, stage, experts_only=experts_only), run.config.sharding
    each = sharding.gradient_merge_mode == "micro_batch"
    ahead = sharding.sharding_prefetch_segments if sharding.overlap_param_gather != "off" else 0
    replay = _Replay(segments, run.view.wide_bytes, run.reduce_bytes)
    for _ in range(STEPS):
        replay.gather(ahead)
        for _ in range(run.micro_batches if each else 1):
            replay.reduce(whole=not each)
        replay.begin_step()
    return replay.pool.total


def segments_of(run: PlannedRun, stage: int, *, experts_only: bool = False) -> list[Traveling]:
    """The segments of a stage in forward order, as the run makes them."""
    plan = make_segments(run.config, run.sizes)
    place = {name: number for number, planned in enumerate(plan) for name in planned.names}
    rows: dict[tuple[int, bool, bool], int] = {}
    found: dict[tuple[int, bool, bool], Traveling] = {}
    held = [spec for spec in run.held(stage) if spec.trainable and (spec.expert or not experts_only)]
    for spec in sorted(held, key=lambda spec: place[spec.name]):
        key = place[spec.name], spec.fp32, spec.expert
        rows[key] = rows.get(key, 0) + run.row_numel(spec)
        item = run.view.wide_bytes if spec.fp32 else run.view.item_bytes
        found[key] = Traveling(rows[key], run.shards(spec), item, run.replicas(spec) > 1)
    return list(found.values())


class _Replay:
    """The steps of a run, as far as they take and give buffers."""

    def __init__(self, segments: Sequence[Traveling], wide: int, reduce: int) -> None:
        self.pool = _Pool()
        self._segments, self._wide, self._reduce = segments, wide, reduce
        self._gradients: dict[int, int] = {}

    def begin_step(self) -> None:
        """Give back the gradients of the last step."""
        for number in range(len(self._segments)):
            if number in self._gradients:
                self.pool.give(self._gradients.pop(number))

    def gather(self, ahead: int) -> None:
        """Gather new parameters, ``ahead`` segments before the one that is received."""
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
        """Reduce gradients, the last segment first; but for replicas all are in flight before one is waited for."""
        flying: list[tuple[int, list[int], int, int]] = []
        for number in reversed(range(len(self._segments))):
            flying.append(self._launch(number, whole=whole))
            if len(flying) > 1 and self._segments[number + 1].replicated:
                self._settle(*flying.pop(0))
        for one in flying:
            self._settle(*one)

    def _launch(self, number: int, *, whole: bool) -> tuple[int, list[int], int, int]:
        """Start a reduction: (segment, lent buffers, the flat gradients, the buffer of the result)."""
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
