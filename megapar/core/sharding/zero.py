"""Stages 1 and 2: parameters stay whole, optimizer state (and reduced gradients) are cut over the shard axis.

A step, for segments in the order in which backward completes them (the last layer first):

    forward      receive(segment)  ........................  waits for the gather that publish started
    backward     add(gradient) -> complete? -> launch reduce-scatter -> (replicas: settle the one before; CPU: the
                 oldest, where much is in flight)
    finish       settle all: gradients of this rank's rows, summed over every data rank
    optimizer    steps masters
    publish      launches the gathers, first layer first; the next forward waits for each where it needs it

Triggers sit on parameters, so that it does not matter who runs the backward. Segments are launched in one planned
order on every rank: an early one waits for its predecessors, and what did not fire is closed with zeros.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megapar.core.comm.buffers import BufferPool
from megapar.core.comm.meter import WaitMeter
from megapar.core.comm.world import World
from megapar.core.health.trail import DigestTrail
from megapar.core.sharding.bucket import Bucket
from megapar.core.sharding.bucket_plan import PlannedBucket
from megapar.core.sharding.cut import ParameterInfo, is_primary, master_box
from megapar.core.sharding.master_shard import MasterShard, ParameterView

IN_FLIGHT_BYTES = 1 << 26  # of gradients
LEAST_IN_FLIGHT = 2  # segments


class ZeroSharding:
    """The distributed optimizer: optimizer state is sharded (ZeRO stage 1), and gradients too (stage 2).

    Stage 2 reduces gradients in every micro-batch, stage 1 once per step.

    units: the model's units in forward order, each the modules whose forward needs its parameters.
    parameters: (description, local parameter) of every trainable parameter.
    reduce_dtype: what gradients travel in. reduce_every_micro_batch: stage 2's way: only a row of gradients is kept
    over the micro-batches.
    plan: which parameters travel together, in forward order; names it has beyond ``parameters`` are passed over.
    overlap_reduce: reduce-scatter inside the backward. overlap_gather: gather inside the next forward, ``prefetch``
    segments ahead of the one in use. offload: masters live in host memory.
    """

    full = False

    def __init__(
        self,
        world: World,
        units: Mapping[str, Sequence[nn.Module]],
        parameters: Sequence[tuple[ParameterInfo, nn.Parameter]],
        master_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        plan: Sequence[PlannedBucket],
        *,
        reduce_every_micro_batch: bool,
        overlap_reduce: bool,
        overlap_gather: bool,
        prefetch: int,
        meter: WaitMeter,
        offload: bool = False,
    ) -> None:
        self._reduce_every = reduce_every_micro_batch
        self._overlap_reduce = overlap_reduce
        self._overlap_gather = overlap_gather
        self._prefetch = prefetch
        dtypes = (master_dtype, reduce_dtype)
        self.segments = _make_segments(world, plan, parameters, dtypes, not reduce_every_micro_batch, meter, offload)
        self._to_gather = len(self.segments)  # the first one whose published row has not been sent
        self._last = False
        self._running = False  # a micro-batch's backward may have left segments to launch
        self._ready: set[int] = set()
        self._next = len(self.segments) - 1
        self._trail: DigestTrail | None = None
        self._flying: deque[int] = deque()  # launched and not settled, first one first
        # On an accelerator a wait would stand in the stream of the backward, and the allocator knows better.
        self._in_flight_bytes = math.inf if world.device.is_async else IN_FLIGHT_BYTES
        for number, segment in enumerate(self.segments):
            for index, member in enumerate(segment.members):
                member.parameter.register_post_accumulate_grad_hook(self._hook(number, index))
        for name, modules in units.items():
            mine = [number for number, segment in enumerate(self.segments) if name in segment.units]
            for module in modules:
                module.register_forward_pre_hook(self._receiver(mine))
        self.parts: list[MasterShard] = []
        for segment in self.segments:
            for part in segment.ranges:
                master = segment.master[part.start : part.end]
                self.parts.append(MasterShard(master, None, part.decay, part.counted, part.router))

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for segment in self.segments:
            segment.begin_step()
        for part in self.parts:
            part.grad = None

    def begin_micro_batch(self, *, last: bool, gradients: int = 1) -> None:
        """Expect one gradient of every parameter; they are reduced now or, at stage 1, in the last micro-batch.

        gradients: of every parameter before it is reduced: those of the whole step, where a pipeline mixes the
        micro-batches and they are reduced once.
        """
        if self._running and self._reducing:
            self._settle_all()
        self._running = True
        self._last = last
        self._ready.clear()
        self._next = len(self.segments) - 1
        for segment in self.segments:
            segment.begin_micro_batch(gradients)

    def finish(self) -> None:
        """Close what did not fire and wait for all reductions."""
        self._settle_all()
        self._running = False
        for segment in self.segments:
            segment.finish()
        parts = iter(self.parts)
        for segment in self.segments:
            assert segment.gradient is not None
            for part in segment.ranges:
                next(parts).grad = segment.gradient[part.start : part.end]

    def publish(self) -> None:
        """Give every parameter its new value, at once or under the next forward."""
        self._to_gather = 0
        self._gather_up_to(self._prefetch if self._overlap_gather else len(self.segments))

    def _gather_up_to(self, number: int) -> None:
        while self._to_gather <= min(number, len(self.segments) - 1):
            self.segments[self._to_gather].publish(overlap=self._overlap_gather)
            self._to_gather += 1

    def _receiver(self, numbers: Sequence[int]) -> Callable[..., None]:
        def receive(*_: object) -> None:
            for number in numbers:
                self._gather_up_to(number + self._prefetch)
                self.segments[number].receive()

        return receive

    def wait(self) -> None:
        """Wait for all gathers."""
        self._gather_up_to(len(self.segments))
        for segment in self.segments:
            segment.receive()

    def views(self, tensors: Sequence[Tensor]) -> Iterator[ParameterView]:
        """Each parameter's piece of tensors that lie beside ``parts`` one for one."""
        remaining = iter(tensors)
        for segment in self.segments:
            ranges = [(part, next(remaining)) for part in segment.ranges]
            for member in segment.members:
                part, flat = next(entry for entry in ranges if entry[0].start <= member.offset < entry[0].end)
                start = member.offset - part.start
                local = flat[start : start + member.numel].view(member.piece)
                yield ParameterView(member.spec, member.box, local.narrow(member.dim, 0, member.box.sizes[member.dim]))

    def watch(self, trail: DigestTrail | None) -> None:
        """Note each parameter's gradient as the backward gives it, or no longer."""
        self._trail = trail

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        # torch shows the garbage collector no way through these hooks: a strong reference would keep the parameters,
        # this object and its groups' threads for ever.
        weak = weakref.ref(self)

        def gradient_is_there(parameter: Tensor) -> None:
            # Without a gradient: it is made later (``core.tensor_parallel.weight_gradients``), or there is none.
            if parameter.grad is not None and (sharding := weak()) is not None:
                sharding._add(number, index)

        return gradient_is_there

    def _add(self, number: int, index: int) -> None:
        """Take the gradient of a segment's member; launch what is complete, in the planned order."""
        if self._trail is not None:
            member = self.segments[number].members[index]
            assert member.parameter.grad is not None
            self._trail.gradient(member.spec.unit, member.spec.name, member.parameter.grad)
        if self.segments[number].add(index) and self._overlap_reduce and self._reducing:
            self._ready.add(number)
            while self._next in self._ready:
                self._launch_next()

    @property
    def _reducing(self) -> bool:
        return self._reduce_every or self._last

    def _launch_next(self) -> None:
        self.segments[self._next].launch(overlap=self._overlap_reduce)
        # The segment before sums its row over the replicas while this one's reduce-scatter runs.
        if self._last and self._next + 1 < len(self.segments):
            before = self.segments[self._next + 1]
            if before.replica.group is not None:
                before.settle(last=True, overlap=self._overlap_reduce)
        self._flying.append(self._next)
        self._next -= 1
        self._land()

    def _land(self) -> None:
        """Settle what was launched first while much is in flight: its buffers serve the segments that come."""
        while len(self._flying) > LEAST_IN_FLIGHT:
            if sum(self.segments[number].nbytes for number in self._flying) <= self._in_flight_bytes:
                return
            self.segments[self._flying.popleft()].settle(last=self._last, overlap=self._overlap_reduce)

    def _settle_all(self) -> None:
        """Launch what the backward left, then wait, in the planned order."""
        while self._next >= 0:
            self._launch_next()
        self._flying.clear()
        for segment in reversed(self.segments):
            segment.settle(last=self._last, overlap=self._overlap_reduce)


def _make_segments(
    world: World,
    plan: Sequence[PlannedBucket],
    parameters: Sequence[tuple[ParameterInfo, nn.Parameter]],
    dtypes: tuple[torch.dtype, torch.dtype],
    whole_gradients: bool,
    meter: WaitMeter,
    offload: bool,
) -> list[Bucket]:
    """One segment per planned one, dtype and pair of axes, in forward order."""
    place = {name: number for number, planned in enumerate(plan) for name in planned.names}
    buckets: dict[tuple[Any, ...], list[tuple[ParameterInfo, nn.Parameter]]] = {}
    for spec, parameter in sorted(parameters, key=lambda entry: place[entry[0].name]):
        shard, replica = _axes(spec)
        key = (place[spec.name], parameter.dtype, world.axis(shard).ranks, world.axis(replica).ranks)
        buckets.setdefault(key, []).append((spec, parameter))
    pool = BufferPool.for_messages(world.device.torch_device)
    grid, rank = world.grid, world.rank
    segments = []
    for members in buckets.values():
        boxed = [(spec, p, master_box(spec, grid, rank), is_primary(spec, grid, rank)) for spec, p in members]
        cut, repeat = (world.axis(name) for name in _axes(members[0][0]))
        segments.append(
            Bucket(
                parameters=boxed,
                shard=cut,
                replica=repeat,
                master_dtype=dtypes[0],
                reduce_dtype=dtypes[1],
                whole_gradients=whole_gradients,
                meter=meter,
                pool=pool,
                new_master=world.device.pinned_zeros if offload else None,
            )
        )
    return segments


def _axes(spec: ParameterInfo) -> tuple[str, str]:
    return ("expert_shard", "expert_replica") if spec.expert else ("shard", "replica")
