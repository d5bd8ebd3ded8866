"""The guard of master weights and moments: detects memory that changes between two updates.

Sharded state exists on one rank only, so a rank can compare it only with itself. After each update a part of it is
digested, and again when the gradients of the next step are complete. The result is reduced together with the gradient
norm, so that all ranks learn of a change in the same step, without another wait of the host.
"""

from __future__ import annotations

import itertools
import math
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.agreement import TEXT_BYTES, reduce_numbers, texts_of_all
from megapar.core.device.base import Device
from megapar.core.health.digested import DigestedTensors, RestingTensors, VisitingTensors
from megapar.core.optimizer.adamw import MOMENTS
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.errors import CorruptionError
from megapar.training.building.job import Job

AUTO = -1
SHARE = 0.01  # maximum share of a step's time
SHOWN = 3
_TIMED_UPDATES = 4  # the median discounts the first step, which takes longer
_SAMPLE_BYTES = 1 << 28


class StateGuard:
    """Checks that master weights and moments are unchanged since the last update.

    ``steps`` is the number of steps in which all of them are compared. ``AUTO`` chooses it after the first steps, so
    that the comparison takes less than ``SHARE`` of a step.

    Attributes:
        messages: Lines for the log.
        delay_steps: Steps between a finding and the reaction to it: one if the host runs ahead and reads the norm a
            step later, and one for offloaded state, which is compared when it is next on the device.
    """

    name = "state"
    interval = sys.maxsize  # every step votes; ``check`` runs only before saves
    before_saves = True
    enabled = True

    def __init__(self, job: Job, steps: int) -> None:
        self._job = job
        self._updates: list[float] = []
        self._steps = 0  # in which all parts are compared once
        self._held_after: deque[int] = deque()  # iterations of the last ``_steps`` updates
        self._digested: DigestedTensors | None = None
        self.messages: list[str] = []
        self.delay_steps = int(job.world.device.is_async) + int(isinstance(job.optimizer, OffloadedOptimizer))
        if steps == AUTO:
            self.messages.append(
                f"masters and moments: comparison starts after a few steps, and takes at most {SHARE:.0%} of a step"
            )
        else:
            self._begin(steps)

    def before_update(self) -> None:
        """Do nothing: the comparison is part of the votes."""

    def after_update(self, iteration: int) -> None:
        """Digest the next part."""
        if self._digested is None:
            self._updates.append(time.perf_counter())
            if len(self._updates) < _TIMED_UPDATES:
                return
            self._begin(self._steps_for(self._updates))
        assert self._digested is not None
        self._digested.hold()
        self._held_after.append(iteration)

    def vote(self) -> int | Tensor:
        """Return 1, or a true scalar on the device, if this rank's memory has changed since the last update, else 0."""
        changed = None if self._digested is None else self._digested.compare()
        return 0 if changed is None else changed

    def vouches_for(self, iteration: int) -> int:
        """Return the first of the last ``_steps`` updates, or 0 before every part was compared once.

        A fault that repeats since then would have been found.
        """
        del iteration  # steps without an update do not count
        return self._held_after[0] if 0 < self._steps == len(self._held_after) else 0

    def check(self, iteration: int) -> None:
        """Compare the digests. Raises CorruptionError, on every rank, with ranks, nodes, devices and parameters."""
        job, changed = self._job, list[tuple[int, int]]()
        if self._digested is not None:
            job.world.device.synchronize()
            self._digested.look()
            changed = self._digested.changed()
        world, device = job.world.axis("world"), job.world.device.torch_device
        bad = torch.tensor(bool(changed), dtype=torch.int64, device=device)
        reduce_numbers(bad, world, "state guard")
        if not bad.item():
            return
        names = self._names(changed)
        places = texts_of_all(self._place() if changed else "", world, device)
        names_of = [text.split("\n") for text in texts_of_all(_fitting(names), world, device)]
        ranks = [rank for rank, place in enumerate(places) if place]
        wrong = "; ".join(f"rank {rank} ({places[rank]}): {_listed(names_of[rank])}" for rank in ranks)
        parameters = list(dict.fromkeys(name for rank in ranks for name in names_of[rank] if name))
        raise CorruptionError(
            f"iteration {iteration}: masters or moments changed between two updates, on {wrong}. Memory there does not "
            "keep its content: check the hardware, and resume from a checkpoint before this.",
            ranks,
            parameters,
        )

    def _begin(self, steps: int) -> None:
        job, self._steps = self._job, steps
        self._held_after = deque(maxlen=steps)
        masters = [shard.master for shard in job.sharding.master_shards]
        homes = list(zip(masters, *(job.optimizer.moments(name) for name in MOMENTS), strict=True))
        if isinstance(job.optimizer, OffloadedOptimizer):
            visiting = VisitingTensors(homes, steps, job.optimizer.visit)
            self._digested = job.optimizer.seen_by = visiting
        else:
            self._digested = RestingTensors([tensor for home in homes for tensor in home], steps)
        self.messages.append(coverage(steps))

    def _steps_for(self, updates: Sequence[float]) -> int:
        """Return the number of steps in which all parts are compared: that of the slowest rank, on every rank."""
        job = self._job
        step = statistics.median(b - a for a, b in itertools.pairwise(updates))
        masters = [shard.master for shard in job.sharding.master_shards]
        optimizer = job.optimizer
        sample = [optimizer.slots] if isinstance(optimizer, OffloadedOptimizer) else masters
        total = sum(master.nbytes for master in masters) * (1 + len(MOMENTS))
        world = job.world.axis("world")
        seconds = seconds_of_turn(sample, total, job.world.device)
        steps = torch.tensor(
            max(1, math.ceil(seconds / (SHARE * step))), dtype=torch.int64, device=job.world.device.torch_device
        )
        reduce_numbers(steps, world, "state guard", dist.ReduceOp.MAX)
        return int(steps.item())

    def _names(self, changed: Sequence[tuple[int, int]]) -> list[str]:
        """Return the names of the tensors in these address ranges."""
        job = self._job
        masters = [shard.master for shard in job.sharding.master_shards]
        kinds = {"master": masters, **{name: job.optimizer.moments(name) for name in MOMENTS}}
        return [
            f"{kind} of {view.spec.name}"
            for kind, tensors in kinds.items()
            for view in job.sharding.views(tensors)
            if any(begin < _end(view.tensor) and end > view.tensor.data_ptr() for begin, end in changed)
        ]

    def _place(self) -> str:
        device = self._job.world.device
        return f"{socket.gethostname()}, {device.torch_device} {device.name}"


def coverage(steps: int) -> str:
    """Describe how often masters and moments are compared, and when a fault is found."""
    if steps == 1:
        return "masters and moments: all compared in every step; a flipped bit is found before the next update"
    return (
        f"masters and moments: all compared within {steps} steps, a part in each; memory that keeps changing is found "
        f"after at most {steps} steps, a single change with a probability of 1 in {steps}"
    )


def seconds_of_turn(sample: Sequence[Tensor], total_bytes: int, device: Device) -> float:
    """Return the seconds to digest ``total_bytes`` twice and compare, extrapolated from a sample of tensors."""
    nbytes = sum(tensor.nbytes for tensor in sample)
    parts = max(1, nbytes // _SAMPLE_BYTES)
    trial = RestingTensors([tensor.detach() for tensor in sample], parts)
    seconds = []
    for _ in range(3):
        device.synchronize()
        start = time.perf_counter()
        trial.hold()
        trial.compare()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * total_bytes * parts / max(1, nbytes)


def _end(tensor: Tensor) -> int:
    """Return the address after a view's last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _fitting(names: Sequence[str]) -> str:
    """Join as many names as fit into a text."""
    lines = itertools.accumulate(names, lambda text, name: f"{text}\n{name}")
    return max((text for text in lines if len(text.encode()) <= TEXT_BYTES), key=len, default="")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
