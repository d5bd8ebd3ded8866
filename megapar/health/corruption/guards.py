"""Guards: checks for wrong values on a rank, and the last iteration that each of them has verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from megapar.arguments import Config
from megapar.core.sharding import replicas
from megapar.data.batches import Loader
from megapar.errors import TrainingError
from megapar.health.corruption.recompute_guard import RecomputeGuard
from megapar.health.corruption.state_guard import StateGuard
from megapar.health.corruption.witness import Witness
from megapar.training.building.pipeline_split import effective_schedule
from megapar.training.checkpoints.local_saves import LocalSaves
from megapar.training.checkpoints.verification import Start
from megapar.training.step.gradients import Gradients
from megapar.training.step.job import Job, copies


class Guard(Protocol):
    """One check. Every rank has the same guards and calls them in the same steps.

    Attributes:
        name: Name in checkpoints.
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
        ...

    def after_update(self, iteration: int) -> None:
        """Run after the optimizer step was launched. A device may still be running it."""
        ...

    def check(self, iteration: int) -> None:
        """Raise TrainingError, on every rank, if something is wrong after an iteration.

        Raises CorruptionError if the ranks at fault are known.
        """
        ...


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
        ...

    def vouches_for(self, iteration: int) -> int:
        """Return the last iteration that is verified if a check after ``iteration`` has passed."""
        ...


class Guards:
    """All guards of a run.

    Attributes:
        witness: Records the faults that the guards find.
    """

    def __init__(self, guards: Sequence[Guard], start: Start, witness: Witness) -> None:
        self._guards = tuple(guards)
        self._voters = [guard for guard in guards if isinstance(guard, Voter)]
        self._passed = start.verified([guard.name for guard in guards])
        self._begun = dict(self._passed)
        self._ran = dict.fromkeys(self._passed, start.iteration)  # before the first step there is nothing to find
        self._iteration = start.iteration
        self.witness = witness

    @property
    def verified(self) -> dict[str, int]:
        """Enabled guard -> last iteration that it has verified, or NEVER."""
        return {guard.name: self._passed[guard.name] for guard in self._guards if guard.enabled}

    def before_update(self) -> None:
        """Run all guards before the optimizer changes this rank's parameters."""
        for guard in self._guards:
            with self._witnessed(guard):
                guard.before_update()

    def after_update(self, iteration: int) -> None:
        """Run all guards after the optimizer step was launched."""
        for guard in self._guards:
            guard.after_update(iteration)

    def forget(self) -> None:
        """Drop what is held of masters and moments between two updates: they are about to move. Run checks first."""
        for guard in self._guards:
            if isinstance(guard, StateGuard):
                guard.forget()

    def votes(self) -> list[int | Tensor]:
        """Return this rank's votes, before an update. Their sums over all ranks go to ``apply_votes``."""
        return [guard.vote() for guard in self._voters]

    def apply_votes(self, sums: Sequence[int], iteration: int) -> Sequence[int]:
        """Act on the sums of all ranks' votes. Raises TrainingError, on every rank, if a rank has found something.

        Returns the remaining sums, which are not votes of guards.
        """
        count = len(self._voters)
        for guard, votes in zip(self._voters, sums[:count], strict=True):
            if votes:
                # A save at this iteration copied the state after the check, so it may contain the fault.
                verified = max(self._begun[guard.name], guard.vouches_for(iteration) - 1 - guard.delay_steps)
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
            with self._witnessed(guard):
                guard.check(iteration)
            self._ran[guard.name] = iteration
            verified = guard.vouches_for(iteration) if isinstance(guard, Voter) else iteration
            self._passed[guard.name] = max(verified, self._passed[guard.name])

    @contextmanager
    def _witnessed(self, guard: Guard) -> Iterator[None]:
        try:
            yield
        except TrainingError as error:
            raise self.witness.record(guard.name, self._iteration, self.verified, error) from None


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
) -> Guards:
    """Return the guards that the flags turn on.

    Args:
        job: This rank's part of the model.
        gradients: Runs forward and backward again for the recompute check.
        loader: Reads micro-batches for the recompute check.
        log_line: Writes a line to the log.
        start: The iteration at which this start begins.
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
    folders = [Path(config.checkpoint.save)] if config.checkpoint.save else []
    if local_saves is not None:
        folders.append(local_saves.folder)
    return Guards(guards, start, Witness(folders, job.world, start.iteration))
