"""What a step runs on: this rank's share of a global batch, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from megapar.arguments import Config
from megapar.data.batches import Loader, MicroBatch
from megapar.model.ernie.model import Ernie
from megapar.training.building.build import make_batch_size, make_progressive
from megapar.training.building.job import Job
from megapar.training.checkpoints.state import Progress
from megapar.training.step.denominators import Denominators


@dataclass(frozen=True)
class StepBatches:
    """Of one step: all that a second run of it needs to give the same.

    batches: this rank's. global_batch: samples on all ranks. first_sample, first_micro_batch: how many were read and
    run before. dropout_seed: of the random streams. length: that samples are cropped to; None: they are whole.
    """

    iteration: int
    batches: Sequence[MicroBatch]
    denominators: Denominators
    global_batch: int
    first_sample: int
    first_micro_batch: int
    dropout_seed: int
    length: int | None = None

    def count_into(self, progress: Progress, *, skipped: bool) -> None:
        """It was done."""
        progress.iteration += 1
        progress.skipped_steps += skipped
        progress.consumed_samples += self.global_batch
        progress.consumed_tokens += self.denominators.tokens
        progress.micro_batches += self.denominators.num_micro_batches


class BatchFeed:
    """The global batches of a run, one after the other, as far as this rank has them.

    denominators: the class that counts what loss terms are divided by.
    """

    def __init__(self, config: Config, job: Job, denominators: type[Denominators] = Denominators) -> None:
        self._job, self._denominators = job, denominators
        self._data = job.world.axis("data")
        self._batch_size = make_batch_size(config)
        self._progressive = make_progressive(config)
        self._micro_batch_size = config.training.micro_batch_size

    def next(self, loader: Loader, progress: Progress) -> StepBatches:
        """What follows after ``progress``; waits for no other rank."""
        global_batch, length = self._grow(progress)
        share = global_batch // (self._micro_batch_size * self._data.size)
        batches = loader.step(progress.consumed_samples, share, length)
        return StepBatches(
            iteration=progress.iteration + 1,
            batches=batches,
            denominators=self._denominators(batches, share * self._data.size, self._data, self._job.meter),
            global_batch=global_batch,
            first_sample=progress.consumed_samples,
            first_micro_batch=progress.micro_batches,
            dropout_seed=progress.dropout_seed,
            length=length,
        )

    def following(self, progress: Progress) -> tuple[int, str]:
        """The step that follows after ``progress`` and its samples, A-B."""
        batch, first = self._batch_size.at(progress.consumed_samples), progress.consumed_samples
        if self._progressive is not None:
            batch = self._progressive.batch_at(progress.iteration)
        return progress.iteration + 1, f"{first}-{first + batch - 1}"

    def _grow(self, progress: Progress) -> tuple[int, int | None]:
        """Samples of this step, and their length where that grows; dropout grows with it."""
        if self._progressive is None:
            return self._batch_size.at(progress.consumed_samples), None
        iteration = progress.iteration
        cast(Ernie, self._job.model).scale_dropout(self._progressive.share(iteration))
        return self._progressive.batch_at(iteration), self._progressive.length_at(iteration)
