"""Communication buffers that a CPU keeps under sharding stages 1 and 2, found by replaying their sizes.

On a CPU, buffers are reused instead of freed (``core/comm/buffers.py``), so memory depends on the buffers that exist
after a few steps. The order in which buckets are sent (``core/sharding/zero.py``) determines which buffers are reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.core.sharding.cut import keeps_aligned
from megapar.model.parameter import ParameterSpec
from megapar.planning.gathered_groups import segments_of
from megapar.planning.planned_run import PlannedRun

STEPS = 3  # after which no step adds a buffer


@dataclass(frozen=True)
class PoolBucket:
    """A bucket of parameters.

    Attributes:
        row: Elements of one shard.
        shards: Number of shards.
        item: Bytes of an element of its parameters.
        replicated: The bucket has replicas over dp (hybrid sharding).
        cast: The master weights are cast into a buffer, which is gathered or copied to the parameters.
    """

    row: int
    shards: int
    item: int
    replicated: bool
    cast: bool


class _Pool:
    """Reuses buffers as ``BufferPool`` does, but records only their bytes."""

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
    """Return the bytes of all buffers of a stage's first rank.

    Args:
        experts_only: Only experts, which stage 3 treats like stage 2 if they are whole on their ranks.
    """
    buckets, sharding = buckets_of(run, stage, experts_only=experts_only), run.config.sharding
    each = sharding.gradient_merge_mode == "micro_batch"
    ahead = sharding.sharding_prefetch_segments if sharding.overlap_param_gather != "off" else 0
    replay = _Replay(buckets, run.view.wide_bytes, run.reduce_bytes)
    for _ in range(STEPS):
        replay.gather(ahead)
        for _ in range(run.micro_batches if each else 1):
            replay.reduce(whole=not each)
        replay.begin_step()
    return replay.pool.total


def buckets_of(run: PlannedRun, stage: int, *, experts_only: bool = False) -> list[PoolBucket]:
    """Return the buckets of a stage in forward order, as in the run."""
    plan = segments_of(run)
    place = {name: number for number, planned in enumerate(plan) for name in planned.names}
    rows: dict[tuple[int, bool, bool], int] = {}
    buckets: dict[tuple[int, bool, bool], PoolBucket] = {}
    held = [spec for spec in run.held(stage) if spec.trainable and (spec.expert or not experts_only)]
    for spec in sorted(held, key=lambda spec: place[spec.name]):
        key = place[spec.name], spec.fp32, spec.expert
        rows[key] = rows.get(key, 0) + run.row_numel(spec)
        item = run.view.wide_bytes if spec.fp32 else run.view.item_bytes
        apart = is_cast_apart(run, spec) or (key in buckets and buckets[key].cast)
        buckets[key] = PoolBucket(rows[key], run.shards(spec), item, run.replicas(spec) > 1, apart)
    return list(buckets.values())


def is_cast_apart(run: PlannedRun, spec: ParameterSpec) -> bool:
    """Return whether a parameter's master weights are cast into a buffer, from which the parameter is copied.

    Where one rank keeps all master weights, parameters are cast where they lie, unless one leaves the next unaligned.
    """
    item = run.view.wide_bytes if spec.fp32 else run.view.item_bytes
    odd = item != run.view.wide_bytes and not keeps_aligned(run.local_numel(spec), item)
    return run.shards(spec) > 1 or odd


class _Replay:
    """Steps of a run, reduced to the buffers that they take from the pool and give back."""

    def __init__(self, buckets: Sequence[PoolBucket], wide: int, reduce: int) -> None:
        self.pool = _Pool()
        self._buckets, self._wide, self._reduce = buckets, wide, reduce
        self._gradients: dict[int, int] = {}

    def begin_step(self) -> None:
        """Give back the gradients of the previous step."""
        for number in range(len(self._buckets)):
            if number in self._gradients:
                self.pool.give(self._gradients.pop(number))

    def gather(self, ahead: int) -> None:
        """Gather new parameters, with ``ahead`` buckets prefetched."""
        in_flight: list[list[int]] = []
        for bucket in self._buckets:
            taken = []
            if bucket.cast:
                taken.append(self.pool.take(bucket.row * bucket.item))
            if bucket.shards > 1:
                taken.append(self.pool.take(bucket.row * bucket.shards * bucket.item))
            in_flight.append(taken[::-1])
            if len(in_flight) > ahead:
                self._give_back(in_flight.pop(0))
        for taken in in_flight:
            self._give_back(taken)

    def _give_back(self, taken: Sequence[int]) -> None:
        for size in taken:
            self.pool.give(size)

    def reduce(self, *, whole: bool) -> None:
        """Reduce gradients, the last bucket first. Without replicas, all are in flight before the first wait."""
        in_flight: list[tuple[int, list[int], int, int]] = []
        for number in reversed(range(len(self._buckets))):
            in_flight.append(self._launch(number, whole=whole))
            if len(in_flight) > 1 and self._buckets[number + 1].replicated:
                self._finish(*in_flight.pop(0))
        for one in in_flight:
            self._finish(*one)

    def _launch(self, number: int, *, whole: bool) -> tuple[int, list[int], int, int]:
        """Start a reduction. Return (bucket, temporary buffers, flat gradients, buffer of the result)."""
        bucket = self._buckets[number]
        elements = bucket.row * bucket.shards
        alone = bucket.shards == 1
        main = self._wide if whole or alone else self._reduce
        if alone and number in self._gradients:
            flat = self._gradients.pop(number)
        else:
            flat = self.pool.take(elements * main)
        if alone:
            return number, [], flat, 0
        temporary = [self.pool.take(elements * self._reduce) for _ in range(1 if main == self._reduce else 2)]
        return number, temporary, flat, self.pool.take(bucket.row * self._reduce)

    def _finish(self, number: int, temporary: Sequence[int], flat: int, result: int) -> None:
        bucket = self._buckets[number]
        self._give_back(temporary)
        if bucket.shards == 1:
            self._gradients[number] = flat
            return
        self.pool.give(flat)
        if number not in self._gradients and self._reduce == self._wide:
            self._gradients[number] = result
            return
        if number not in self._gradients:
            self._gradients[number] = self.pool.take(bucket.row * self._wide)
        self.pool.give(result)
