"""The input of a step: this rank's micro-batches of a global batch, and their denominators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from megapar.arguments import Config
from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.axis import Axis
from megapar.data.batches import Loader, MicroBatch
from megapar.data.sampling.skipping import Range, sample_at
from megapar.model.ernie.model import Ernie
from megapar.training.step.job import Job
from megapar.training.step.progress import Progress
from megapar.training.step.schedules import make_progressive


class Denominators:
    """Sums over the labels' weights of each loss term, and the tokens that are not padding, of the global batch.

    Labels without weights count 1 each. The sums are in fp64, in which counts are exact.

    The constructor launches the sum over the data ranks. The first use, after the first forward, waits for it: at the
    start of a step, while parameters are in flight, a small message would have to wait for them. ``num_micro_batches``
    is that of the global batch, on all data ranks together.
    """

    def __init__(self, batches: Sequence[MicroBatch], num_micro_batches: int, data: Axis) -> None:
        self.num_micro_batches = num_micro_batches
        self._names = sorted(batches[0].counts)
        self._data = data
        labels = [sum(batch.counts[name] for batch in batches) for name in self._names]
        self._counts = torch.tensor([*labels, sum(batch.valid_tokens for batch in batches)], dtype=torch.float64)
        self._work = reduce_numbers(self._counts, data, "counts", async_op=True)

    @property
    def items(self) -> dict[str, float]:
        """Loss term -> sum of its labels' weights, an integer without weights."""
        return dict(zip(self._names, self._settled(), strict=False))

    @property
    def tokens(self) -> int:
        """Number of tokens in the global batch, without padding."""
        return int(self._settled()[-1])

    def _settled(self) -> list[float]:
        if self._work is not None:
            self._data.meter.wait(self._work, f"{self._data.name}/counts")
            self._work = None
        return [int(count) if count.is_integer() else count for count in self._counts.tolist()]


@dataclass(frozen=True)
class StepBatches:
    """The input of one step: everything that is needed to run it again with the same result.

    Attributes:
        iteration: Number of the step, from 1.
        denominators: Label weights of the global batch.
        global_batch: Samples on all ranks.
        first_micro_batch: Number of micro-batches run before this step.
        length: Number of tokens that samples are cropped to. None keeps them whole.
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
        """Advance ``progress`` by this step."""
        progress.iteration += 1
        progress.skipped_steps += skipped
        progress.consumed_samples += self.global_batch
        progress.consumed_tokens += self.denominators.tokens
        progress.micro_batches += self.denominators.num_micro_batches


class BatchFeed:
    """The input of consecutive steps: this rank's share of each global batch, whose labels ``denominators`` counts."""

    def __init__(self, config: Config, job: Job, denominators: type[Denominators] = Denominators) -> None:
        self._job, self._denominators = job, denominators
        self._data = job.world.axis("data")
        self._phases = config.phases
        self._progressive = make_progressive(config)
        self._micro_batch_size = config.training.micro_batch_size

    def next(self, loader: Loader, progress: Progress) -> StepBatches:
        """Return the input of the step after ``progress``. Does not wait for other ranks."""
        global_batch, length = self._grow(progress)
        share = global_batch // (self._micro_batch_size * self._data.size)
        batches = loader.step(progress.consumed_samples, share, length)
        return StepBatches(
            iteration=progress.iteration + 1,
            batches=batches,
            denominators=self._denominators(batches, share * self._data.size, self._data),
            global_batch=global_batch,
            first_sample=progress.consumed_samples,
            first_micro_batch=progress.micro_batches,
            dropout_seed=progress.dropout_seed,
            length=length,
        )

    def following(self, progress: Progress, skipped: Sequence[Range] = ()) -> tuple[int, str]:
        """Return the number of the step after ``progress``, and the numbers of its samples as "first-last"."""
        first = progress.consumed_samples
        last = first + self.batch_size(progress) - 1
        return progress.iteration + 1, f"{sample_at(first, skipped)}-{sample_at(last, skipped)}"

    def batch_size(self, progress: Progress) -> int:
        """Return the number of samples of the step after ``progress``."""
        if self._progressive is not None:
            return self._progressive.batch_at(progress.iteration)
        return self._phases.at(progress.consumed_samples).batch.at(progress.consumed_samples)

    def _grow(self, progress: Progress) -> tuple[int, int | None]:
        """Return the number of samples of this step and their length. Sets the dropout, which grows with the length."""
        if self._progressive is None:
            return self.batch_size(progress), None
        cast(Ernie, self._job.model).scale_dropout(self._progressive.share(progress.iteration))
        return self.batch_size(progress), self._progressive.length_at(progress.iteration)
