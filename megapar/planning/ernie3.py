"""ERNIE 3.0 as a plan sees it: a sample runs the universal layers with its task's attention, then its branch only.

How many samples of a micro-batch are of which task follows from their numbers (``data.mixture.Shares``): a plan takes
the mean for what is sent and for time, and for memory the micro-batch that generates most, whose next-word head runs at
every position.

Shape letters: S positions of a sample, H hidden of the universal module, h of the branches, M rows of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from megapar.core.pipeline.stages import Chunk
from megapar.data.mixture import Shares
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.model.ernie3.tasks import CLASSES, GENERATION, tasks_of
from megapar.model.flops import modules
from megapar.planning.layout import Layout
from megapar.planning.parts import Part, Product, Unit
from megapar.planning.work import Span, Work

MOST_COUNTED = 1024  # micro-batches; tasks come round again long before


@dataclass(frozen=True)
class Mix:
    """Samples of a micro-batch by task, and of those the ones that generate. idle: samples that run through a branch
    that none belongs to, so that every rank reduces every parameter."""

    by_task: dict[str, float]
    idle_understanding: float
    idle_generation: float

    @property
    def generation(self) -> float:
        """Samples with the attention of generation."""
        return sum(count for task, count in self.by_task.items() if task in GENERATION)

    @property
    def understanding(self) -> float:
        """The others."""
        return sum(self.by_task.values()) - self.generation


def mixes(layout: Layout) -> tuple[Mix, Mix]:
    """Of a micro-batch: the mean, and the one that generates most."""
    weights = tasks_of(layout.config.data.ernie_tasks)
    shares, size = Shares(list(weights.values())), layout.config.training.micro_batch_size
    whole = sum(weights.values())
    period = min(MOST_COUNTED, int(whole * max(weight.denominator for weight in weights.values())) * 2)
    found = []
    for number in range(period):
        counts = dict.fromkeys(weights, 0.0)
        for place, task in enumerate(weights):
            before, after = (shares.count(place, at * size) for at in (number, number + 1))
            counts[task] = float(after - before)
        found.append(_mix(counts))
    mean = Mix(
        {task: sum(mix.by_task[task] for mix in found) / period for task in weights},
        sum(mix.idle_understanding for mix in found) / period,
        sum(mix.idle_generation for mix in found) / period,
    )
    return mean, max(found, key=lambda mix: mix.generation)


def _mix(counts: dict[str, float]) -> Mix:
    one = Mix(counts, 0.0, 0.0)
    return Mix(counts, float(not one.understanding), float(not one.generation))


class Ernie3Work(Work):
    """The units of ERNIE 3.0 for one mix of samples."""

    def __init__(self, layout: Layout, mix: Mix) -> None:
        super().__init__(layout)
        self.mix = mix
        self._sizes = cast(Ernie3Sizes, layout.sizes)

    def layer(self, number: int) -> Unit:
        """Layer ``number``: a universal one, or one of both branches."""
        if number < self._sizes.num_layers:
            return self._universal
        return self._first_branches if number == self._sizes.num_layers else self._branches

    def input_of(self, chunk: Chunk) -> float:
        """See ``Work.input_of``."""
        return self._x(self._width(chunk.layers.start))

    def _width(self, layer: int) -> int:
        """Features of what a layer takes."""
        return self._sizes.hidden_size if layer <= self._sizes.num_layers else self._sizes.task_hidden_size

    def _x(self, width: int) -> float:
        return self.layout.item * self.layout.own * width

    @cached_property
    def _universal(self) -> Unit:
        mix, universal = self.mix, modules(self._sizes)[0]
        parts = [*self._block(universal, mix.understanding, generates=False)]
        parts += self._block(universal, mix.generation, generates=True)
        return Unit("universal", tuple(parts), self._x(self._sizes.hidden_size))

    @cached_property
    def _branches(self) -> Unit:
        mix = self.mix
        parts = self._block(self._sizes.branch, mix.understanding + mix.idle_understanding, generates=False)
        parts += self._block(self._sizes.branch, mix.generation + mix.idle_generation, generates=True)
        return Unit("branches", tuple(parts), self._x(self._sizes.task_hidden_size))

    @cached_property
    def _first_branches(self) -> Unit:
        """With the products that lead into the branches, whose weights are whole on every rank."""
        a, H, h = self.layout, self._sizes.hidden_size, self._sizes.task_hidden_size
        more = (self.mix.idle_understanding + self.mix.idle_generation) / a.samples
        rows = a.own * (1 + more)
        into = Part(
            "into branches",
            a.stored(rows * H),
            (Product(rows, H, h),),
            moved=a.item * rows * (2 * H + h),
            transient=a.item * rows * 2 * H,
        )
        return Unit("branches", (into, *self._branches.parts), self._x(H))

    def _block(self, sizes: ErnieSizes, samples: float, *, generates: bool) -> list[Part]:
        """A layer for so many samples."""
        if not samples:
            return []
        layout = replace(self.layout, of=sizes, through=samples, _cuts={}, _rows={})
        work, whole = Work(layout), self._sizes
        if not generates:
            return [*work.attention(Span(causal=False)), *work.feed_forward()]
        parts = [*work.attention(Span(True, whole.segments, whole.memory)), *work.feed_forward()]
        remembered = 1 - 1 / whole.segments
        if layout.cut and remembered:  # every rank of mp needs the whole segment that is remembered
            size = layout.item * layout.tokens * sizes.hidden_size * remembered
            parts.append(Part("memory", messages=(self.messages.message("mp", "all_gather", size, "forward"),)))
        return parts

    @cached_property
    def head(self) -> Unit:
        """The heads of all tasks, one after the other."""
        a, h, length = self.layout, self._sizes.task_hidden_size, self._sizes.seq_length
        parts = [self.leaving(h)]
        for task, samples in self.mix.by_task.items():
            if task in CLASSES:
                kept = a.item * samples * (length * h + h)
                parts.append(Part(task, kept, (Product(samples, h, h),), moved=2 * a.item * samples * length * h))
                continue
            asked = 1.0 if task in GENERATION else a.config.data.mlm_probability
            parts += self.word_head(h, samples * length * asked)
        return Unit("head", tuple(parts), self._x(h))


def work_of(layout: Layout) -> Work:
    """What a micro-batch asks of a rank, in the mean."""
    return Ernie3Work(layout, mixes(layout)[0]) if isinstance(layout.sizes, Ernie3Sizes) else Work(layout)


def largest(work: Work) -> Work:
    """The same for the micro-batch that needs most memory."""
    return Ernie3Work(work.layout, mixes(work.layout)[1]) if isinstance(work, Ernie3Work) else work
