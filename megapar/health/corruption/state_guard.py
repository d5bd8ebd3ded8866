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
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.agreement import TEXT_BYTES, reduce_numbers, texts_of_all
from megapar.core.device.base import Device
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.errors import CorruptionError, listed
from megapar.health.corruption.state_digest import InPlaceDigest, OffloadedDigest, SplitDigest
from megapar.training.step.job import Job

AUTO = -1
SHARE = 0.01  # maximum share of a step's time
SHOWN = 3
_TIMED_UPDATES = 4  # the shortest step counts: first steps, and those that wait for other programs, take longer
_SAMPLE_BYTES = 1 << 28
PART_BYTES = 1 << 20  # to digest less takes as long


class StateGuard:
    """Checks that master weights and moments are unchanged since the last update.

    ``steps`` is the number of steps in which all of them are compared. ``AUTO`` chooses it after the first steps, so
    that the comparison takes less than ``SHARE`` of a step on average. Parts are then at least ``PART_BYTES``;
    if that makes fewer parts than steps, some steps have none.

    Attributes:
        delay_steps: Steps between a finding and the reaction to it: one if the host runs ahead and reads the norm a
            step later, and one for offloaded state, which is compared when it is next on the device.
    """

    name = "state"
    interval = sys.maxsize  # every step votes; ``check`` runs only before saves
    before_saves = True
    enabled = True

    def __init__(self, job: Job, steps: int) -> None:
        self._job = job
        # A CPU's time does not depend on what else runs there; an accelerator's host does not compute.
        self._clock = time.perf_counter if job.world.device.is_async else time.process_time
        self._step_start = 0.0  # after a trial
        self._step_seconds: list[float] = []
        self._trial_seconds: list[float] = []
        self._steps = 0  # in which all parts are compared once
        self._digested_after: deque[int] = deque()  # iterations of the last ``_steps`` updates
        self._digest: SplitDigest | None = None
        self.messages: list[str] = []
        self.delay_steps = int(job.world.device.is_async) + int(isinstance(job.optimizer, OffloadedOptimizer))
        if steps == AUTO:
            self.messages.append(
                f"masters and moments: comparison starts after a few steps, and takes at most {SHARE:.0%} of a step"
            )
        else:
            self._begin(steps, steps)

    def before_update(self) -> None:
        """Do nothing: the comparison is part of the votes."""

    def after_update(self, iteration: int) -> None:
        """Digest the next part."""
        if self._digest is None:
            self._step_seconds.append(self._clock() - self._step_start)
            last = len(self._step_seconds) == _TIMED_UPDATES
            # On a CPU a trial per step: repeated at once, a digest would find its data in the caches.
            trials = 3 * last if self._job.world.device.is_async else 1
            self._trial_seconds += [self._seconds_of_turn() for _ in range(trials)]
            self._step_start = self._clock()
            if not last:
                return
            self._begin(*self._choose())
        assert self._digest is not None
        self._digest.digest_next()
        self._digested_after.append(iteration)

    def forget(self) -> None:
        """Leave out the next comparison: the state is about to change without an update."""
        if self._digest is not None:
            self._digest.reset()

    def vote(self) -> int | Tensor:
        """Return 1, or a true scalar on the device, if this rank's memory has changed since the last update, else 0."""
        changed = None if self._digest is None else self._digest.compare()
        return 0 if changed is None else changed

    def verified_up_to(self, iteration: int) -> int:
        """Return the first of the last ``_steps`` updates, or 0 before every part was compared once.

        A fault that repeats since then would have been found.
        """
        del iteration  # steps without an update do not count
        return self._digested_after[0] if 0 < self._steps == len(self._digested_after) else 0

    def check(self, iteration: int) -> None:
        """Compare the digests. Raises CorruptionError, on every rank, with ranks, nodes, devices and parameters."""
        job, changed = self._job, list[tuple[int, int]]()
        if self._digest is not None:
            job.world.device.synchronize()
            self._digest.compare_now()
            changed = self._digest.changed()
        world, device = job.world.axis("world"), job.world.device.torch_device
        bad = torch.tensor(bool(changed), dtype=torch.int64, device=device)
        reduce_numbers(bad, world, "state guard")
        if not bad.item():
            return
        names = self._names(changed)
        places = texts_of_all(self._place() if changed else "", world, device)
        names_of = [text.split("\n") for text in texts_of_all(_fitting(names), world, device)]
        ranks = [rank for rank, place in enumerate(places) if place]
        wrong = "; ".join(f"rank {rank} ({places[rank]}): {listed(names_of[rank], SHOWN)}" for rank in ranks)
        parameters = list(dict.fromkeys(name for rank in ranks for name in names_of[rank] if name))
        raise CorruptionError(
            f"iteration {iteration}: masters or moments changed between two updates, on {wrong}. Memory there does not "
            "keep its content: check the hardware, and resume from a checkpoint before this.",
            ranks,
            parameters,
        )

    def _begin(self, steps: int, parts: int) -> None:
        """Begin to compare all state in ``steps`` steps, in at most as many parts."""
        job, self._steps = self._job, steps
        self._digested_after = deque(maxlen=steps)
        masters = [shard.master for shard in job.sharding.master_shards]
        states = map(job.optimizer.state, job.optimizer.states)
        homes = [[tensor for tensor in home if tensor is not None] for home in zip(masters, *states, strict=True)]
        if isinstance(job.optimizer, OffloadedOptimizer):
            visiting = OffloadedDigest(homes, steps, job.optimizer.visit)
            self._digest = job.optimizer.seen_by = visiting
        else:
            self._digest = InPlaceDigest([tensor for home in homes for tensor in home], steps, parts)
        self.messages.append(coverage(steps, parts))

    @property
    def _total_bytes(self) -> int:
        states = (state for name in self._job.optimizer.states for state in self._job.optimizer.state(name))
        masters = (shard.master for shard in self._job.sharding.master_shards)
        return sum(tensor.nbytes for tensor in (*masters, *states) if tensor is not None)

    def _seconds_of_turn(self) -> float:
        job, optimizer = self._job, self._job.optimizer
        masters = [shard.master for shard in job.sharding.master_shards]
        sample = [optimizer.slots] if isinstance(optimizer, OffloadedOptimizer) else masters
        return seconds_of_turn(sample, self._total_bytes, job.world.device, self._clock)

    def _choose(self) -> tuple[int, int]:
        """Return the steps in which all parts are compared, those of the slowest rank, and the number of parts."""
        job = self._job
        step = min(self._step_seconds[1:])
        seconds = statistics.median(self._trial_seconds[1:])  # the first one also loads kernels
        steps = torch.tensor(
            max(1, math.ceil(seconds / (SHARE * step))), dtype=torch.int64, device=job.world.device.torch_device
        )
        reduce_numbers(steps, job.world.axis("world"), "state guard", dist.ReduceOp.MAX)
        number = int(steps.item())
        # Offloaded state is digested whenever an update brings it, so every step has a part.
        least = 0 if isinstance(job.optimizer, OffloadedOptimizer) else PART_BYTES
        total = self._total_bytes
        return number, number if least * number <= total else max(1, total // least)

    def _names(self, changed: Sequence[tuple[int, int]]) -> list[str]:
        """Return the names of the tensors in these address ranges."""
        job = self._job
        masters = [shard.master for shard in job.sharding.master_shards]
        kinds = {"master": masters, **{name: job.optimizer.state(name) for name in job.optimizer.states}}
        return [
            f"{kind} of {view.spec.name}"
            for kind, tensors in kinds.items()
            for view in job.sharding.views(tensors)
            if any(begin < _end(view.tensor) and end > view.tensor.data_ptr() for begin, end in changed)
        ]

    def _place(self) -> str:
        device = self._job.world.device
        return f"{socket.gethostname()}, {device.torch_device} {device.name}"


def coverage(steps: int, parts: int) -> str:
    """Describe how often masters and moments are compared, in how many parts, and when a fault is found."""
    if steps == 1:
        return "masters and moments: all compared in every step; a flipped bit is found before the next update"
    return (
        f"masters and moments: all compared within {steps} steps, "
        f"{'a part in each' if parts == steps else f'in {parts} of them'}; memory that keeps changing is found "
        f"after at most {steps} steps, a single change with a probability of 1 in {steps}"
    )


def seconds_of_turn(
    sample: Sequence[Tensor], total_bytes: int, device: Device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds to digest ``total_bytes`` twice and compare, extrapolated from a sample of tensors."""
    nbytes = sum(tensor.nbytes for tensor in sample)
    parts = max(1, nbytes // _SAMPLE_BYTES)
    trial = InPlaceDigest([tensor.detach() for tensor in sample], parts)
    device.synchronize()
    start = clock()
    trial.digest_next()
    device.synchronize()
    # The comparison digests again, a step later: here it would find the same data in the caches.
    return 2 * (clock() - start) * total_bytes * parts / max(1, nbytes)


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
