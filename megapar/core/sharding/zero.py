"""ZeRO stages 1 and 2: parameters stay whole; optimizer state (and reduced gradients) are sharded.

A step, with buckets in the order in which the backward completes them (last layer first):

    forward              [1] finish the bucket's gather, which start_param_gather launched
    backward             [2] add a gradient; if the bucket is complete: [3] start its reduce-scatter
                         [4] finish the previous bucket's, for its sum over replicas; on a CPU the oldest's, if many are
                             in flight
    finish               [5] finish all: gradients of this rank's rows, summed over every data rank
    optimizer            update the masters
    start_param_gather   [6] launch the gathers, first layer first; the next forward waits for each when it needs it

The triggers are hooks on parameters, so any caller may run the backward. Buckets are launched in the same planned order
on every rank: one that is complete early waits for its predecessors, and missing gradients are zero.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.comm.buffers import BufferPool
from megapar.core.comm.world import World
from megapar.core.device.dtypes import WeightProduct
from megapar.core.device.kinds import device_class
from megapar.core.sharding.bucket import Bucket, BucketDtypes
from megapar.core.sharding.bucket_plan import IN_FLIGHT_BYTES, LEAST_IN_FLIGHT, PlannedBucket
from megapar.core.sharding.bucket_row import OptimizerRange
from megapar.core.sharding.cut import ParameterInfo, is_primary, master_box
from megapar.core.sharding.gradient_sink import GradientSink, set_gradient_sink
from megapar.core.sharding.master_shard import MasterShard, ParameterView
from megapar.health.corruption.step_digest import StepDigest


class ZeroSharding:
    """The distributed optimizer: optimizer state is sharded (ZeRO stage 1), and gradients too (stage 2).

    Stage 2 reduces gradients in every micro-batch, stage 1 once per step.

    Args:
        units: The model's units in forward order, each with the modules whose forward needs its parameters.
        plan: The buckets, in forward order; names that are not in ``parameters`` are ignored.
        reduce_every_micro_batch: Stage 2: keep only this rank's row of gradients over the micro-batches.
        overlap_reduce: Run reduce-scatters inside the backward.
        overlap_gather: Run gathers inside the next forward.
        prefetch: Buckets gathered ahead of the one in use.
        changed: Called after the optimizer changed the masters, before the parameters are gathered.

    Attributes:
        buckets: In forward order.
        master_shards: This rank's master shards, by bucket and range.
    """

    full = False

    def __init__(
        self,
        world: World,
        units: Mapping[str, Sequence[nn.Module]],
        parameters: Sequence[tuple[ParameterInfo, nn.Parameter]],
        dtypes: BucketDtypes,
        plan: Sequence[PlannedBucket],
        *,
        reduce_every_micro_batch: bool,
        overlap_reduce: bool,
        overlap_gather: bool,
        prefetch: int,
        offload: bool = False,
        add_product: Callable[..., Tensor] | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self._changed = changed
        self._reduce_every = reduce_every_micro_batch
        self._overlap_reduce = overlap_reduce
        self._overlap_gather = overlap_gather
        self._prefetch = prefetch
        self.buckets = _make_buckets(
            world, plan, parameters, dtypes, not reduce_every_micro_batch, offload, add_product
        )
        self._to_gather = len(self.buckets)  # the first bucket whose gather is still to be launched
        self._last = False
        self._running = False  # a micro-batch's backward may have left reductions to start
        self._ready: set[int] = set()
        self._next = len(self.buckets) - 1
        self._step_digest: StepDigest | None = None
        self._in_flight: deque[int] = deque()  # started and not finished, oldest first
        # No limit on an accelerator: a wait would block the stream of the backward, and the allocator reuses memory.
        self._most_in_flight_bytes = math.inf if world.device.is_async else IN_FLIGHT_BYTES
        for number, bucket in enumerate(self.buckets):
            for index, member in enumerate(bucket.members):
                member.parameter.register_post_accumulate_grad_hook(self._hook(number, index))
                least = device_class(member.parameter.device.type).least_product_elements
                if bucket.shard.size == 1 and member.numel >= least:
                    set_gradient_sink(member.parameter, self._sink(number, index))
        gathers = not all(bucket.aliased for bucket in self.buckets)
        for name, modules in units.items() if gathers else ():
            numbers = [number for number, bucket in enumerate(self.buckets) if name in bucket.units]
            for module in modules:
                module.register_forward_pre_hook(self._before_forward(numbers))
        self.master_shards: list[MasterShard] = []
        for bucket in self.buckets:
            for span in bucket.ranges:
                self.master_shards.append(_shard(bucket, span))

    def begin_step(self) -> None:
        for number, bucket in enumerate(self.buckets):
            bucket.begin_step()
            if number < self._to_gather:
                bucket.forget_weights()
        for shard in self.master_shards:
            shard.grad = None

    def begin_micro_batch(self, *, last: bool, gradients: int = 1) -> None:
        """Prepare for a micro-batch. Gradients are reduced in it or, at stage 1, only in the last one.

        gradients: the number of gradients per parameter before the reduction; more than 1 in a pipeline, which mixes
        the micro-batches of a step and reduces once.
        """
        if self._running and self._reducing:
            self._finish_all()
        self._running = True
        self._last = last
        self._ready.clear()
        self._next = len(self.buckets) - 1
        for bucket in self.buckets:
            bucket.begin_micro_batch(gradients)

    def finish(self) -> None:
        """Launch buckets with missing gradients and wait for all reductions."""
        self._finish_all()  # [5]
        self._running = False
        for bucket in self.buckets:
            bucket.finish()
        shards = iter(self.master_shards)
        for bucket in self.buckets:
            assert bucket.gradient is not None
            for span in bucket.ranges:
                next(shards).grad = bucket.gradient[span.start : span.end]

    def start_param_gather(self) -> None:
        """Gather the new parameters, now or overlapped with the next forward."""
        if self._changed is not None:
            self._changed()
        self._to_gather = 0
        self._gather_up_to(self._prefetch if self._overlap_gather else len(self.buckets))

    def _gather_up_to(self, number: int) -> None:
        while self._to_gather <= min(number, len(self.buckets) - 1):
            self.buckets[self._to_gather].start_param_gather(overlap=self._overlap_gather)  # [6]
            self._to_gather += 1

    def _before_forward(self, numbers: Sequence[int]) -> Callable[..., None]:
        def finish_gathers(*_: object) -> None:
            for number in numbers:
                self._gather_up_to(number + self._prefetch)
                self.buckets[number].finish_param_gather()  # [1]

        return finish_gathers

    def wait(self) -> None:
        """Wait for all gathers."""
        self._gather_up_to(len(self.buckets))
        for bucket in self.buckets:
            bucket.finish_param_gather()

    def views(self, tensors: Sequence[Tensor | None]) -> Iterator[ParameterView]:
        remaining = iter(tensors)
        for bucket in self.buckets:
            ranges = [(span, next(remaining)) for span in bucket.ranges]
            for member in bucket.members:
                span, flat = next(entry for entry in ranges if entry[0].start <= member.offset < entry[0].end)
                if flat is None:
                    continue
                start = member.offset - span.start
                local = flat[start : start + member.numel].view(member.piece)
                yield ParameterView(member.spec, member.box, local.narrow(member.dim, 0, member.box.sizes[member.dim]))

    def cut_rows(self, moves: Callable[[ParameterInfo], bool]) -> None:
        shards = iter(self.master_shards)
        for bucket in self.buckets:
            for span in bucket.ranges:
                inside = [member for member in bucket.members if span.start <= member.offset < span.end]
                parts = (length for member in inside for length in member.parts(by_row=moves(member.spec)))
                next(shards).parts = tuple(parts)

    def watch(self, step_digest: StepDigest | None) -> None:
        """Record each parameter's gradient as the backward makes it; None: stop."""
        self._step_digest = step_digest

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        # The garbage collector cannot traverse torch's hooks: a strong reference would keep the parameters, this object
        # and its groups' threads forever.
        weak = weakref.ref(self)

        def on_gradient(_: Tensor) -> None:
            if (sharding := weak()) is not None:
                sharding._add(number, index)

        return on_gradient

    def _sink(self, number: int, index: int) -> GradientSink:
        weak = weakref.ref(self)

        def add_product(product: Callable[[], Tensor]) -> Tensor | None:
            sharding = weak()
            # A step digest records each gradient, so autograd must make it.
            if sharding is None or sharding._step_digest is not None or not isinstance(product, WeightProduct):
                return product()
            sharding.buckets[number].add_product(index, product)
            return None

        return add_product

    def _add(self, number: int, index: int) -> None:
        """Take the gradient of a bucket's member; launch complete buckets, in the planned order."""
        bucket = self.buckets[number]
        if not bucket.has_gradient(index):
            return  # it is made later (``core.tensor_parallel.weight_gradients``), or not at all
        if self._step_digest is not None:
            member = bucket.members[index]
            assert member.parameter.grad is not None
            self._step_digest.gradient(member.spec.unit, member.spec.name, member.parameter.grad)
        if bucket.add(index) and self._overlap_reduce and self._reducing:  # [2]
            self._ready.add(number)
            while self._next in self._ready:
                self._start_next()

    @property
    def _reducing(self) -> bool:
        return self._reduce_every or self._last

    def _start_next(self) -> None:
        bucket = self.buckets[self._next]
        bucket.start_grad_reduce(overlap=self._overlap_reduce)  # [3]
        # The previous bucket sums its row over the replicas while this one's reduce-scatter runs.
        if self._last and self._next + 1 < len(self.buckets):
            before = self.buckets[self._next + 1]
            if before.replica.group is not None:
                before.finish_grad_reduce(last=True, overlap=self._overlap_reduce)  # [4]
        if bucket.shard.size > 1 or bucket.replica.size > 1:
            self._in_flight.append(self._next)
            self._finish_oldest()
        self._next -= 1

    def _finish_oldest(self) -> None:
        """Finish the oldest reductions while too many bytes are in flight; later buckets reuse their buffers."""
        while len(self._in_flight) > LEAST_IN_FLIGHT:
            if sum(self.buckets[number].nbytes for number in self._in_flight) <= self._most_in_flight_bytes:
                return
            oldest = self.buckets[self._in_flight.popleft()]
            oldest.finish_grad_reduce(last=self._last, overlap=self._overlap_reduce)  # [4]

    def _finish_all(self) -> None:
        """Start the remaining reductions, then finish all, in the planned order."""
        while self._next >= 0:
            self._start_next()
        self._in_flight.clear()
        for bucket in reversed(self.buckets):
            bucket.finish_grad_reduce(last=self._last, overlap=self._overlap_reduce)


def _shard(bucket: Bucket, span: OptimizerRange) -> MasterShard:
    """Make the master shard of a range: a view of the bucket's master or, if that is split, remainders."""
    facts = {"counted": span.counted, **span.treatment._asdict()}
    if bucket.master is not None:
        return MasterShard(bucket.master[span.start : span.end], None, **facts)
    numel = span.end - span.start
    # Of a whole number of 32-bit integers, as digests read memory.
    remainders = torch.zeros(numel + numel % 2, dtype=torch.int16, device=bucket.members[0].parameter.device)
    return MasterShard(remainders[:numel], None, weights=lambda: bucket.weights[span.start : span.end], **facts)


def _make_buckets(
    world: World,
    plan: Sequence[PlannedBucket],
    parameters: Sequence[tuple[ParameterInfo, nn.Parameter]],
    dtypes: BucketDtypes,
    accumulates_unsharded: bool,
    offload: bool,
    add_product: Callable[..., Tensor] | None,
) -> list[Bucket]:
    """Make one bucket per planned bucket, dtype and pair of axes, in forward order."""
    place = {name: number for number, planned in enumerate(plan) for name in planned.names}
    groups: dict[tuple[Any, ...], list[tuple[ParameterInfo, nn.Parameter]]] = {}
    for spec, parameter in sorted(parameters, key=lambda entry: place[entry[0].name]):
        key = (place[spec.name], parameter.dtype, *(axis.ranks for axis in _axes(world, spec)))
        groups.setdefault(key, []).append((spec, parameter))
    pool = BufferPool.for_messages(world.device.torch_device)
    grid, rank = world.grid, world.rank
    buckets = []
    for members in groups.values():
        boxed = [
            # Rank 0 has the longest piece along every axis.
            (spec, p, master_box(spec, grid, rank), is_primary(spec, grid, rank), master_box(spec, grid, 0).numel)
            for spec, p in members
        ]
        cut, repeat = _axes(world, members[0][0])
        buckets.append(
            Bucket(
                parameters=boxed,
                shard=cut,
                replica=repeat,
                dtypes=dtypes,
                accumulates_unsharded=accumulates_unsharded,
                pool=pool,
                new_master=world.device.pinned_zeros if offload else None,
                add_product=add_product,
            )
        )
    return buckets


def _axes(world: World, spec: ParameterInfo) -> tuple[Axis, Axis]:
    """Return the axes of a parameter's shards and replicas. Experts on the ranks of all others have their axes."""
    dense, experts = ((world.axis(f"{kind}shard"), world.axis(f"{kind}replica")) for kind in ("", "expert_"))
    apart = any(one.ranks != other.ranks for one, other in zip(dense, experts, strict=True))
    return experts if spec.expert and apart else dense
