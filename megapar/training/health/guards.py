"""Guards: what finds that a rank holds or computes something wrong, and up to which iteration nothing was."""

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
from megapar.training.building.job import Job, copies
from megapar.training.building.stages import effective_schedule
from megapar.training.checkpoints.local_saves import LocalSaves
from megapar.training.checkpoints.verification import Start
from megapar.training.health.recompute_guard import RecomputeGuard
from megapar.training.health.state_guard import StateGuard
from megapar.training.health.witness import Witness
from megapar.training.step.gradients import Gradients


class Guard(Protocol):
    """One check. Every rank has the same guards and calls them in the same steps.

    name: as checkpoints record it. interval: in steps. before_saves: it runs besides before every save and at the end.
    enabled: whether there is anything it can find here, as far as is known, the same on every rank.
    """

    name: str
    interval: int
    before_saves: bool
    enabled: bool

    def before_update(self) -> None:
        """The optimizer is about to change what this rank holds."""
        ...

    def after_update(self, iteration: int) -> None:
        """It has been told to; a device may still be at it."""
        ...

    def check(self, iteration: int) -> None:
        """Raise TrainingError, on every rank, where something is wrong after an iteration: CorruptionError, where it is
        known on which ranks.
        """
        ...


@runtime_checkable
class Voter(Protocol):
    """A guard whose finding travels with the gradient norm.

    messages: lines for the log, until they are popped. delay_steps: steps after which its findings are acted on.
    """

    messages: list[str]
    delay_steps: int

    def vote(self) -> int | Tensor:
        """Whether this rank has found something, as a number, of the host or on the device."""
        ...

    def vouches_for(self, iteration: int) -> int:
        """The last iteration after which nothing was wrong, where a check after this one has passed."""
        ...


class Guards:
    """All guards of a run. start: where it begins. witness: writes down what they find."""

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
        """For each enabled guard, the last iteration after which nothing was wrong, or NEVER."""
        return {guard.name: self._passed[guard.name] for guard in self._guards if guard.enabled}

    def before_update(self) -> None:
        """The optimizer is about to change what this rank holds."""
        for guard in self._guards:
            with self._witnessed(guard):
                guard.before_update()

    def after_update(self, iteration: int) -> None:
        """It has been told to."""
        for guard in self._guards:
            guard.after_update(iteration)

    def votes(self) -> list[int | Tensor]:
        """This rank's findings, before an update; their sums over all ranks go to ``apply_votes``."""
        return [guard.vote() for guard in self._voters]

    def apply_votes(self, sums: Sequence[int], iteration: int) -> Sequence[int]:
        """Raise TrainingError, on every rank, where one has found something since an iteration. Returns the sums of
        votes that are not the guards'.
        """
        own = len(self._voters)
        for guard, found in zip(self._voters, sums[:own], strict=True):
            if found:
                # What was saved at this iteration was copied after its check: it may have the fault in it.
                good = max(self._begun[guard.name], guard.vouches_for(iteration) - 1 - guard.delay_steps)
                self._passed[guard.name] = min(self._passed[guard.name], good)
        self.check([guard for guard, found in zip(self._voters, sums[:own], strict=True) if found], iteration)
        return sums[own:]

    def pop_messages(self) -> list[str]:
        """Return lines for the log since the last call."""
        found = [line for guard in self._voters for line in guard.messages]
        for guard in self._voters:
            guard.messages.clear()
        return found

    def due(self, iteration: int, *, saved: bool = False) -> list[Guard]:
        """What is to run after an iteration. saved: a save follows, or the run's end, be it before the first step."""
        self._iteration = iteration
        return [
            guard
            for guard in self._guards
            if guard.enabled
            and (guard.before_saves if saved else iteration % guard.interval == 0)
            and self._ran[guard.name] != iteration
        ]

    def check(self, guards: Sequence[Guard], iteration: int) -> None:
        """Run guards, once nothing of the step is under way; raises CorruptionError, on every rank."""
        for guard in guards:
            with self._witnessed(guard):
                guard.check(iteration)
            self._ran[guard.name] = iteration
            good = guard.vouches_for(iteration) if isinstance(guard, Voter) else iteration
            self._passed[guard.name] = max(good, self._passed[guard.name])

    @contextmanager
    def _witnessed(self, guard: Guard) -> Iterator[None]:
        try:
            yield
        except TrainingError as error:
            raise self.witness.tell(guard.name, self._iteration, self.verified, error) from None


class ReplicaGuard:
    """Parameters that several ranks hold are the same bits on all of them (``core/sharding/replicas.py``)."""

    name = "replicas"
    before_saves = True

    def __init__(self, job: Job, interval: int) -> None:
        self.interval = interval
        self.enabled = job.world.grid.world_size > 1
        self._job = job

    def before_update(self) -> None:
        """Nothing to keep."""

    def after_update(self, iteration: int) -> None:
        """Nothing to keep."""

    def check(self, iteration: int) -> None:
        """Compare all copies; raises CorruptionError, on every rank, naming parameters and ranks."""
        self.enabled = replicas.check(copies(self._job), self._job.world, f"iteration {iteration}")


def make_guards(
    config: Config,
    job: Job,
    gradients: Gradients,
    loader: Loader,
    say: Callable[[str], None],
    start: Start,
    local_saves: LocalSaves | None,
) -> Guards:
    """As the flags say. say: tells the run's log. What they find is written down where the next start looks."""
    guards: list[Guard] = []
    if interval := config.reliability.replica_check_interval:
        guards.append(ReplicaGuard(job, interval))
    if interval := config.reliability.recompute_check_interval:
        schedule, compiled = effective_schedule(config), config.training.compile
        guards.append(
            RecomputeGuard(job, gradients, loader, interval, schedule=schedule, changes_kernels=not compiled, say=say)
        )
    if steps := config.reliability.state_digest_steps:
        guards.append(StateGuard(job, steps))
    folders = [Path(config.checkpoint.save)] if config.checkpoint.save else []
    if local_saves is not None:
        folders.append(local_saves.folder)
    return Guards(guards, start, Witness(folders, job.world, start.iteration))
