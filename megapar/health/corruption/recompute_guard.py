"""The recompute check: a micro-batch is run again and must give the same bits.

                  rank 0          rank 1          rank 2
    twice [1]     m0  m0          m1  m1          m2  m2      finds an intermittent fault, on that rank
    swapped [2]   m1              m2              m0          finds a permanent one: m2 on rank 1 against m2 on rank 2

All ranks run together, because the collectives of a layout need all their ranks. Dropout masks are functions of the
micro-batch's number, and no update is applied. The check compares the outputs of units and stages, the losses, every
gradient before its reduction, and the reduced gradients. Micro-batches are swapped only if every rank has the whole
model. If layers are spread over ranks, the order of a sum may differ between ranks, and permanent faults are not found.

The first check runs three times. If the three results differ, the device is not deterministic, and the check is turned
off.
"""

from __future__ import annotations

import itertools
import socket
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megapar.core.comm.agreement import numbers_of_all, texts_of_all
from megapar.core.comm.world import World
from megapar.core.pipeline.schedule import GPIPE
from megapar.data.batches import Loader
from megapar.errors import CorruptionError, listed
from megapar.health.corruption.step_digest import DigestPoint, DigestRecord, StepDigest, first_difference
from megapar.training.step.batches import StepBatches
from megapar.training.step.gradients import Gradients
from megapar.training.step.job import Job

SHOWN = 4
SPREAD = ("pp", "mp", "cp", "ep", "emp")
ADVICE = (
    "A device or its memory is faulty: take it out of service, and resume from a checkpoint before this. "
    "If it is sound, its kernels are not deterministic: pass --recompute-check-interval 0 to train without the check."
)


def where(world: World) -> str:
    """Describe this rank with its node and device, for messages."""
    number = world.launched[world.rank] if world.grid.world_size > 1 else 0
    return f"rank {number} on {socket.gethostname()}, {world.device.torch_device} ({world.device.name})"


class FirstDifference(NamedTuple):
    """The first difference between results."""

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
    text = listed([f"{names[rank]} of {nodes[rank]}" for rank in ranks], SHOWN, "; ")
    return FirstDifference(text, ranks, tuple(dict.fromkeys(names[rank] for rank in ranks)))


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


@dataclass(eq=False)
class RecomputeGuard:
    """Runs the first micro-batch of the last step again; with a pipeline, as many as its schedule needs.

    Attributes:
        loader: Reads the micro-batches of other ranks.
        changes_kernels: Switch an accelerator to deterministic kernels for the check. Compiled code would have to be
            compiled again for that.
        enabled: False once the device was found not to be deterministic.
    """

    name = "recompute"
    before_saves = False

    job: Job
    gradients: Gradients
    loader: Loader
    interval: int
    schedule: str
    changes_kernels: bool
    log_line: Callable[[str], None]
    enabled: bool = True

    def __post_init__(self) -> None:
        world = self.job.world
        self._units = [spec.unit for spec in self.job.table]
        self._num = 1 if self.job.pipeline is None or self.schedule == GPIPE else world.grid.pp
        self.changes_kernels = self.changes_kernels and world.device.is_async
        self._known = False  # True once the device is known to be deterministic
        self._swaps = world.axis("data").size > 1 and all(world.axis(name).size == 1 for name in SPREAD)

    def before_update(self) -> None:
        """Do nothing."""

    def after_update(self, iteration: int) -> None:
        """Do nothing."""

    def check(self, iteration: int) -> None:
        """Run and compare. Raises CorruptionError, on every rank, with ranks, nodes, devices and first difference."""
        if not self.enabled:
            return
        step = self.gradients.work
        assert step is not None, "a step comes before the check that follows it"
        work = replace(step, batches=step.batches[: self._num])
        with self._unnoticed():
            runs = [self._run(work) for _ in range(2 if self._known else 3)]  # [1]
            swapped = self._run(self._next_ones(work)) if self._swaps else None  # [2]
        if not self._repeats(iteration, runs):
            return
        if not self._known:
            self._known = True
            self._swaps = self._swaps and self._alike()
        if swapped is not None and self._swaps:
            self._compare(iteration, runs[0].local(), swapped.local())

    def _run(self, work: StepBatches) -> DigestRecord:
        job, digest = self.job, StepDigest(self._units)
        job.sharding.watch(digest)
        if job.pipeline is not None:
            job.pipeline.step_digest = digest
        try:
            with digest.watching(job.model.units()):
                totals = self.gradients.repeat(work)
        finally:
            job.sharding.watch(None)
            if job.pipeline is not None:
                job.pipeline.step_digest = None
        for name, value in sorted(totals.sums.items()):
            digest.sums(f"the loss {name}", value)
        for name, value in (("losses", totals.routing), ("load", totals.load), ("drops", totals.dropped)):
            digest.sums(f"the routing's {name}", value)
        for shard in job.sharding.master_shards:
            assert shard.grad is not None
            digest.reduced(shard.grad)
        return digest.end()

    def _next_ones(self, work: StepBatches) -> StepBatches:
        """Return the next data rank's micro-batch, with its number, so that it gets the same masks."""
        data = self.job.world.axis("data")
        other = (data.rank + 1) % data.size
        batch = self.loader.first_of(other, work.first_sample, work.length)
        return replace(work, batches=[batch], first_micro_batch=work.first_micro_batch + other - data.rank)

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Keep the runs out of the step's statistics: bytes sent, waits, counters, random state and gradients."""
        job = self.job
        comm = job.comm
        before = comm.launched.copy(), comm.host_waits
        device = job.world.device.torch_device
        accelerators = [] if device.type == "cpu" else [device]
        kind = "cuda" if device.type == "cpu" else device.type
        try:
            with job.world.uncounted(), torch.random.fork_rng(accelerators, device_type=kind), self._repeatable():
                yield
        finally:
            comm.launched, comm.host_waits = before
        job.sharding.begin_step()

    @contextmanager
    def _repeatable(self) -> Iterator[None]:
        """Use deterministic kernels if there are any, as for the backward of attention on CUDA."""
        if not self.changes_kernels or torch.are_deterministic_algorithms_enabled():
            yield
            return
        memory: Any = torch.utils.deterministic
        filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.use_deterministic_algorithms(False)
            memory.fill_uninitialized_memory = filled

    def _repeats(self, iteration: int, runs: list[DigestRecord]) -> bool:
        """Return True if all runs agree on every rank. Turns the check off if the first three runs all differ."""
        world = self.job.world
        pairs = list(itertools.combinations(runs, 2))
        differences = [first_difference(run, other) for run, other in pairs]
        local = any(first_difference(run.local(), other.local()) for run, other in pairs)
        flags = [*(point is not None for point in differences), local]
        rows = numbers_of_all(flags, world.axis("world"), world.device.torch_device)
        *differ, local_count = (sum(column) for column in zip(*rows, strict=True))
        if not any(differ):
            return True
        named = first_over_ranks(min((point for point in differences if point is not None), default=None), world)
        # If only a minority of ranks do not repeat, they are faulty. If most do not, this kind of device does not.
        if len(runs) > 2 and all(differ) and (local_count == 0 or 2 * local_count > len(rows)):
            self.enabled = False
            self.log_line(
                f"recompute check: off, three runs of a micro-batch gave three results: first {named.text}; "
                "pass --deterministic to use kernels that repeat theirs"
            )
            return False
        message = (
            f"iteration {iteration}: a micro-batch that was run again gave other bits: first {named.text}. {ADVICE}"
        )
        raise CorruptionError(message, named.ranks, named.tensors)

    def _alike(self) -> bool:
        """Return True if all devices are of one kind, so that their results can be compared."""
        world = self.job.world
        name = zlib.crc32(world.device.name.encode())
        alike = len({row[0] for row in numbers_of_all([name], world.axis("world"), world.device.torch_device)}) == 1
        if not alike:
            self.log_line("recompute check: micro-batches are not swapped between ranks, because their devices differ")
        return alike

    def _compare(self, iteration: int, mine: DigestRecord, swapped: DigestRecord) -> None:
        """Compare this rank's results with those of the rank that ran its micro-batch, over the ring of data ranks."""
        world, data = self.job.world, self.job.world.axis("data")
        device = world.device.torch_device
        rows = numbers_of_all([mine.hash(), swapped.hash(), len(mine.digests), len(swapped.digests)], data, device)
        wrong = [row[0] != rows[rank - 1][1] for rank, row in enumerate(rows)]
        if not any(wrong):
            return
        first: FirstDifference | None = None
        if len({length for row in rows for length in row[2:]}) == 1:
            everything = numbers_of_all([*mine.digests, *swapped.digests], data, device)
            theirs = mine._replace(digests=tuple(everything[data.rank - 1][len(mine.digests) :]))
            first = first_over_ranks(first_difference(mine, theirs), world)
        at_fault = suspects(wrong)
        texts = texts_of_all(where(world), data, device)
        named = listed([texts[rank] for rank in at_fault], SHOWN, "; ")
        raise CorruptionError(
            f"iteration {iteration}: ranks that ran the same micro-batch gave other bits. At fault is "
            f"{'' if len(at_fault) == 1 else 'one of '}{named}"
            f"{f'; they first differ in {first.text}' if first else ''}. {ADVICE}",
            [data.ranks[rank] for rank in at_fault],
            first.tensors if first else (),
        )
