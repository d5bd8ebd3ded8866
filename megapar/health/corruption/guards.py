"""Guards: checks for wrong values on a rank, what each of them has verified, and the record of a fault."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

from torch import Tensor

from megapar.arguments import Config
from megapar.checkpoints.format.faults import RECORD, Blamed, Fault
from megapar.checkpoints.format.shards import write_bytes
from megapar.checkpoints.ownership.scalars import Start
from megapar.checkpoints.save_load.local_saves import LocalSaves
from megapar.core.comm.world import World
from megapar.core.sharding import replicas
from megapar.data.batches import Loader
from megapar.errors import CorruptionError, TrainingError
from megapar.files.location import Place, at
from megapar.health.corruption.recompute_guard import RecomputeGuard
from megapar.health.corruption.state_guard import StateGuard
from megapar.training.building.partition import effective_schedule
from megapar.training.step.gradients import Gradients
from megapar.training.step.job import Job, copies


class Guard(Protocol):
    """One check. Every rank has the same guards and calls them in the same steps.

    Attributes:
        interval: Steps between checks.
        before_saves: Also check before every save and at the end.
        enabled: False if the check cannot find anything on this layout or device. The same on every rank.
    """

    name: str
    interval: int
    before_saves: bool
    enabled: bool

    def before_update(self) -> None:
        """Run before the optimizer changes this rank's parameters."""

    def after_update(self, iteration: int) -> None:
        """Run after the optimizer step was launched. A device may still be running it."""

    def check(self, iteration: int) -> None:
        """Raise TrainingError, on every rank, if something is wrong after an iteration.

        Raises CorruptionError if the ranks at fault are known.
        """


@runtime_checkable
class Voter(Protocol):
    """A guard whose vote is reduced together with the gradient norm.

    Attributes:
        messages: Lines for the log that ``Guards.pop_messages`` has not returned yet.
        delay_steps: Number of steps between a finding and the reaction to it.
    """

    messages: list[str]
    delay_steps: int

    def vote(self) -> int | Tensor:
        """Return 1, or a true scalar on the device, if this rank has found something wrong, else 0."""

    def verified_up_to(self, iteration: int) -> int:
        """Return the last iteration that is verified if a check after ``iteration`` has passed."""


class FaultRecord:
    """The record of a fault that a guard has found, so that the next start resumes from a checkpoint before it.

    A failing rank writes only the record, and moves or removes nothing, since it cannot be trusted.

    Args:
        folders: Folders in which the next start looks for the record.
        began: Last iteration done before this start.
        others: Names of checkpoints in the folders that are on other lineages.

    Attributes:
        hosts: Host of every rank, once known.
    """

    def __init__(self, folders: Sequence[Place], world: World, began: int, others: Collection[str] = ()) -> None:
        self._folders = tuple(map(at, folders))
        self._world = world
        self._began = began
        self._others = others
        self.hosts: Sequence[str] = ()

    def write(self, check: str, iteration: int, verified: Mapping[str, int], error: TrainingError) -> CorruptionError:
        """Write the record of a fault, unless another rank has. Returns the error to raise, which locates the fault."""
        known = error if isinstance(error, CorruptionError) else CorruptionError(str(error))
        ranks, parameters = known.ranks, known.parameters
        blamed = tuple(self._blamed(rank) for rank in ranks)
        message = " ".join(
            [str(error), *(f"R{str(suspect)[1:]}." for suspect in blamed if suspect.node not in str(error))]
        )
        fault = Fault(
            check, iteration, self._began, dict(verified), blamed, parameters, str(error), tuple(sorted(self._others))
        )
        content = json.dumps(fault.to_json(), indent=1).encode() + b"\n"
        for folder in self._folders:
            try:
                _write_once(folder, content)
            except OSError as failure:
                message += (
                    f" {folder / RECORD} could not be written ({failure}): newer checkpoints may contain the fault."
                )
        return CorruptionError(message, ranks, parameters)

    def _blamed(self, rank: int) -> Blamed:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or self._world.grid.world_size)
        number = self._world.launched[rank] % max(1, per_node)
        device = self._world.device
        node = self.hosts[rank] if rank < len(self.hosts) else "unknown"
        return Blamed(rank, node, device.type if device.type == "cpu" else f"{device.type}:{number} ({device.name})")


def _write_once(folder: Place, content: bytes) -> None:
    """Write the record durably, unless another rank has. Raises OSError."""
    aside = at(folder) / f"{RECORD}.tmp-{uuid.uuid4().hex[:12]}"
    try:
        write_bytes(aside, content)
        with suppress(FileExistsError):
            aside.publish(at(folder) / RECORD)
    finally:
        aside.remove()


class Guards:
    """All guards of a run, and the record of the faults that they find."""

    def __init__(self, guards: Sequence[Guard], start: Start, fault_record: FaultRecord) -> None:
        self._guards = tuple(guards)
        self._voters = [guard for guard in guards if isinstance(guard, Voter)]
        self._passed = start.verified([guard.name for guard in guards])
        self._verified_before = dict(self._passed)
        self._ran = dict.fromkeys(self._passed, start.iteration)  # before the first step there is nothing to find
        self._iteration = start.iteration
        self.fault_record = fault_record

    @property
    def verified(self) -> dict[str, int]:
        """Enabled guard -> last iteration that it has verified, or NEVER."""
        return {guard.name: self._passed[guard.name] for guard in self._guards if guard.enabled}

    def before_update(self) -> None:
        """Run all guards before the optimizer changes this rank's parameters."""
        for guard in self._guards:
            with self._recorded(guard):
                guard.before_update()

    def after_update(self, iteration: int) -> None:
        """Run all guards after the optimizer step was launched."""
        for guard in self._guards:
            guard.after_update(iteration)

    def forget(self) -> None:
        """Leave out the next comparison of masters and moments: they are about to move. Run checks first."""
        for guard in self._guards:
            if isinstance(guard, StateGuard):
                guard.forget()

    def votes(self) -> list[int | Tensor]:
        """Return this rank's votes, before an update. Their sums over all ranks go to ``apply_votes``."""
        return [guard.vote() for guard in self._voters]

    def apply_votes(self, sums: Sequence[int], iteration: int) -> Sequence[int]:
        """Act on the sums of all ranks' votes; return the other sums. Raises TrainingError on every rank."""
        count = len(self._voters)
        for guard, votes in zip(self._voters, sums[:count], strict=True):
            if votes:
                # A save at this iteration copied the state after the check, so it may contain the fault.
                verified = max(
                    self._verified_before[guard.name], guard.verified_up_to(iteration) - 1 - guard.delay_steps
                )
                self._passed[guard.name] = min(self._passed[guard.name], verified)
        self.check([guard for guard, votes in zip(self._voters, sums[:count], strict=True) if votes], iteration)
        return sums[count:]

    def pop_messages(self) -> list[str]:
        """Return the lines for the log since the last call."""
        lines = [line for guard in self._voters for line in guard.messages]
        for guard in self._voters:
            guard.messages.clear()
        return lines

    def due(self, iteration: int, *, saved: bool = False) -> list[Guard]:
        """Return the guards to run after an iteration. ``saved`` is True if a save or the end of the run follows."""
        self._iteration = iteration
        return [
            guard
            for guard in self._guards
            if guard.enabled
            and (guard.before_saves if saved else iteration % guard.interval == 0)
            and self._ran[guard.name] != iteration
        ]

    def check(self, guards: Sequence[Guard], iteration: int) -> None:
        """Run guards, when nothing of the step is in flight any more. Raises CorruptionError, on every rank."""
        for guard in guards:
            with self._recorded(guard):
                guard.check(iteration)
            self._ran[guard.name] = iteration
            verified = guard.verified_up_to(iteration) if isinstance(guard, Voter) else iteration
            self._passed[guard.name] = max(verified, self._passed[guard.name])

    @contextmanager
    def _recorded(self, guard: Guard) -> Iterator[None]:
        try:
            yield
        except TrainingError as error:
            raise self.fault_record.write(guard.name, self._iteration, self.verified, error) from None


class ReplicaGuard:
    """Checks that replicated parameters have the same bits on all their ranks (``core/sharding/replicas.py``)."""

    name = "replicas"
    before_saves = True

    def __init__(self, job: Job, interval: int) -> None:
        self.interval = interval
        self.enabled = job.world.grid.world_size > 1
        self._job = job

    def before_update(self) -> None:
        """Do nothing."""

    def after_update(self, iteration: int) -> None:
        """Do nothing."""

    def check(self, iteration: int) -> None:
        """Compare all replicas. Raises CorruptionError, on every rank, with parameters and ranks."""
        self.enabled = replicas.check(copies(self._job), self._job.world, f"iteration {iteration}")


def make_guards(
    config: Config,
    job: Job,
    gradients: Gradients,
    loader: Loader,
    log_line: Callable[[str], None],
    start: Start,
    local_saves: LocalSaves | None,
    others: Collection[str],
) -> Guards:
    """Return the guards that the flags turn on.

    Args:
        gradients: Runs forward and backward again for the recompute check.
        loader: Reads micro-batches for the recompute check.
        local_saves: Local checkpoints, whose folder also gets the record of a fault. None without them.
    """
    guards: list[Guard] = []
    if interval := config.reliability.replica_check_interval:
        guards.append(ReplicaGuard(job, interval))
    if interval := config.reliability.recompute_check_interval:
        schedule, compiled = effective_schedule(config), job.compiled
        guards.append(
            RecomputeGuard(
                job, gradients, loader, interval, schedule=schedule, changes_kernels=not compiled, log_line=log_line
            )
        )
    if steps := config.reliability.state_digest_steps:
        guards.append(StateGuard(job, steps))
    folders: list[Place] = [config.checkpoint.save] if config.checkpoint.save else []
    if local_saves is not None:
        folders.append(local_saves.local.folder)
    return Guards(guards, start, FaultRecord(folders, job.world, start.iteration, others))
