"""The guard of masters and moments: memory that changes by itself between two updates.

No other rank holds what sharding cuts, so that nothing can be compared but a rank's own state with itself: after each
update a part of it is digested, and once more when the gradients of the next step are complete. Whether a rank found a
change travels with the gradient norm, so that all ranks hear of it in the same step and the host waits for nothing.
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
SHARE = 0.01  # of a step
SHOWN = 3
_TIMED_UPDATES = 4  # the first step is not like the others
_SAMPLE_BYTES = 1 << 28


class StateGuard:
    """Masters and moments are what the last update left.

    steps: that a turn through all of them takes; ``AUTO``: as many as keep it below ``SHARE`` of a step, chosen after
    the first steps. messages: for the log. delay_steps: a host that runs ahead gets a norm a step later,
    and what is offloaded is compared when it next comes to the device.
    """

    name = "state"
    interval = sys.maxsize  # every rank hears of every step; ``check`` is for saves
    before_saves = True
    enabled = True

    def __init__(self, job: Job, steps: int) -> None:
        self._job = job
        self._updates: list[float] = []
        self._steps = 0  # of a turn
        self._held_after: deque[int] = deque()  # iterations of the last turn's updates
        self._digested: DigestedTensors | None = None
        self.messages: list[str] = []
        self.delay_steps = int(job.world.device.is_async) + int(isinstance(job.optimizer, OffloadedOptimizer))
        if steps == AUTO:
            self.messages.append(f"masters and moments: compared after a few steps, for at most {SHARE:.0%} of a step")
        else:
            self._begin(steps)

    def before_update(self) -> None:
        """It was compared with the gradient norm."""

    def after_update(self, iteration: int) -> None:
        """Digest the part whose turn it is."""
        if self._digested is None:
            self._updates.append(time.perf_counter())
            if len(self._updates) < _TIMED_UPDATES:
                return
            self._begin(self._steps_for(self._updates))
        assert self._digested is not None
        self._digested.hold()
        self._held_after.append(iteration)

    def vote(self) -> int | Tensor:
        """1, or true on the device, where this rank's memory has changed since the last update."""
        found = None if self._digested is None else self._digested.compare()
        return 0 if found is None else found

    def vouches_for(self, iteration: int) -> int:
        """Memory that changes again and again from then on would have been seen: every part has had its turn."""
        del iteration  # a step that changed nothing is none of a turn's
        return self._held_after[0] if 0 < self._steps == len(self._held_after) else 0

    def check(self, iteration: int) -> None:
        """Compare what is held; raises CorruptionError, on every rank, naming ranks, nodes, devices and parameters."""
        job, found = self._job, list[tuple[int, int]]()
        if self._digested is not None:
            job.world.device.synchronize()
            self._digested.look()
            found = self._digested.changed()
        world, device = job.world.axis("world"), job.world.device.torch_device
        bad = torch.tensor(bool(found), dtype=torch.int64, device=device)
        reduce_numbers(bad, world, "state guard")
        if not bad.item():
            return
        names = self._names(found)
        places = texts_of_all(self._place() if found else "", world, device)
        told = [text.split("\n") for text in texts_of_all(_fitting(names), world, device)]
        ranks = [rank for rank, place in enumerate(places) if place]
        wrong = "; ".join(f"rank {rank} ({places[rank]}): {_listed(told[rank])}" for rank in ranks)
        parameters = list(dict.fromkeys(name for rank in ranks for name in told[rank] if name))
        raise CorruptionError(
            f"iteration {iteration}: masters or moments changed between two updates, on {wrong}. Memory there does not "
            "keep what is written: look at the hardware, and resume from a checkpoint before this.",
            ranks,
            parameters,
        )

    def _begin(self, steps: int) -> None:
        job, self._steps = self._job, steps
        self._held_after = deque(maxlen=steps)
        masters = [part.master for part in job.sharding.parts]
        homes = list(zip(masters, *(job.optimizer.moments(name) for name in MOMENTS), strict=True))
        if isinstance(job.optimizer, OffloadedOptimizer):
            visiting = VisitingTensors(homes, steps, job.optimizer.visit)
            self._digested = job.optimizer.seen_by = visiting
        else:
            self._digested = RestingTensors([tensor for home in homes for tensor in home], steps)
        self.messages.append(coverage(steps))

    def _steps_for(self, updates: Sequence[float]) -> int:
        """How many steps a turn must take, the same on every rank: the slowest rank's."""
        job = self._job
        step = statistics.median(b - a for a, b in itertools.pairwise(updates))
        masters = [part.master for part in job.sharding.parts]
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

    def _names(self, found: Sequence[tuple[int, int]]) -> list[str]:
        """What lies at these addresses."""
        job = self._job
        masters = [part.master for part in job.sharding.parts]
        kinds = {"master": masters, **{name: job.optimizer.moments(name) for name in MOMENTS}}
        return [
            f"{kind} of {view.spec.name}"
            for kind, tensors in kinds.items()
            for view in job.sharding.views(tensors)
            if any(begin < _end(view.tensor) and end > view.tensor.data_ptr() for begin, end in found)
        ]

    def _place(self) -> str:
        device = self._job.world.device
        return f"{socket.gethostname()}, {device.torch_device} {device.name}"


def coverage(steps: int) -> str:
    """What of masters and moments is compared, and when a fault is seen."""
    if steps == 1:
        return "masters and moments: all compared in every step; a bit that flips is seen before the next update"
    return (
        f"masters and moments: all compared within {steps} steps, a part in each; memory that changes again and again "
        f"is seen after at most {steps} steps, a change that happens once with a chance of 1 in {steps}"
    )


def seconds_of_turn(sample: Sequence[Tensor], total_bytes: int, device: Device) -> float:
    """How long it takes to digest so many bytes twice and compare, by trying it on tensors like them."""
    nbytes = sum(tensor.nbytes for tensor in sample)
    parts = max(1, nbytes // _SAMPLE_BYTES)
    tried = RestingTensors([tensor.detach() for tensor in sample], parts)
    seconds = []
    for _ in range(3):
        device.synchronize()
        start = time.perf_counter()
        tried.hold()
        tried.compare()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * total_bytes * parts / max(1, nbytes)


def _end(tensor: Tensor) -> int:
    """The address behind a view's last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _fitting(names: Sequence[str]) -> str:
    """As many names as a text may have."""
    lines = itertools.accumulate(names, lambda text, name: f"{text}\n{name}")
    return max((text for text in lines if len(text.encode()) <= TEXT_BYTES), key=len, default="")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
