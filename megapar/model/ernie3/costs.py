"""Costs of ERNIE 3.0 on a rank: a sample passes the universal layers with its task's attention, then its branch.

The tasks of a micro-batch's samples are determined by its number. Time and communication are those of the mean
micro-batch. Memory is that of the micro-batch with the most generation samples, whose next-word head runs at all
positions.

Shape letters: H hidden of the universal module, h of the branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megapar.core.attention_mask import AttentionMask
from megapar.model.cost.model_cost import FORWARD_AND_BACKWARD, MASKED_PERCENT, OpCost, Product, UnitCost
from megapar.model.cost.rank_view import RankView
from megapar.model.ernie.costs import ErnieCost
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie3.sizes import CLASSES, GENERATION, Ernie3Sizes


@dataclass(frozen=True)
class Mix:
    """Samples of a micro-batch.

    Attributes:
        idle_understanding: Samples that pass the understanding branch although none belongs to it, so that all ranks
            reduce all parameters.
        idle_generation: The same for the generation branch.
    """

    by_task: Mapping[str, float]
    idle_understanding: float
    idle_generation: float

    @property
    def generation(self) -> float:
        """Number of samples with the attention of generation."""
        return sum(count for task, count in self.by_task.items() if task in GENERATION)

    @property
    def understanding(self) -> float:
        """Number of the other samples."""
        return sum(self.by_task.values()) - self.generation


def mixes(counts: Sequence[Mapping[str, float]]) -> tuple[Mix, Mix]:
    """Return the mean of micro-batches and the one with the most generation samples, from the samples of each task."""
    batches = [_mix(by_task) for by_task in counts]
    mean = Mix(
        {task: sum(mix.by_task[task] for mix in batches) / len(batches) for task in batches[0].by_task},
        sum(mix.idle_understanding for mix in batches) / len(batches),
        sum(mix.idle_generation for mix in batches) / len(batches),
    )
    return mean, max(batches, key=lambda mix: mix.generation)


def _mix(by_task: Mapping[str, float]) -> Mix:
    one = Mix(by_task, 0.0, 0.0)
    return Mix(by_task, float(not one.understanding), float(not one.generation))


class Ernie3Cost(ErnieCost):
    """Costs of ERNIE 3.0's units for one mix of samples; by default the mean mix."""

    sizes: Ernie3Sizes

    def __init__(self, sizes: Ernie3Sizes, view: RankView, mix: Mix | None = None) -> None:
        super().__init__(sizes, view)
        self._mix = mix

    @cached_property
    def mix(self) -> Mix:
        """Samples of the micro-batch."""
        return self._mix or mixes(self.view.task_counts())[0]

    @property
    def largest(self) -> Ernie3Cost:
        """See ``ModelCost``."""
        return Ernie3Cost(self.sizes, self.view, mixes(self.view.task_counts())[1])

    @cached_property
    def embedding(self) -> UnitCost:
        """See ``ErnieCost``. Hidden states also count as its input."""
        return self._operators.embedding(self._embedding_kept, self._hidden_bytes(self.sizes.hidden_size))

    def layer(self, number: int) -> UnitCost:
        """Return the cost of layer ``number``: a universal layer, or a layer of both branches."""
        if number < self.sizes.num_layers:
            return self._universal
        return self._first_branches if number == self.sizes.num_layers else self._branches

    @cached_property
    def head(self) -> UnitCost:
        """Cost of the heads of all tasks."""
        view, h, length = self.view, self.sizes.task_hidden_size, self.sizes.seq_length
        operators = [self._operators.leaving(h, scatters=False)]
        for task, samples in self.mix.by_task.items():
            if task in CLASSES:
                kept, moved = (view.item_bytes * samples * (length * h + h), 2 * view.item_bytes * samples * length * h)
                operators.append(OpCost(task, kept, (Product(samples, h, h),), moved=moved))
                continue
            share = 1.0 if task in GENERATION else view.masked_share
            operators += self.masked_word_head(h, samples * length * share)
        return UnitCost("head", tuple(operators), self._hidden_bytes(h))

    @classmethod
    def forward_flops(cls, sizes: Any, seq_length: int) -> list[int]:
        """See ``ModelCost``. A sample passes one branch, and 15 % of its positions are masked."""
        whole = sizes.seq_length
        encoders = sizes.universal, sizes.branch
        universal, branch = (ErnieCost.layer_flops(replace(of, num_layers=1), whole)[0] for of in encoders)
        into = 2 * sizes.hidden_size * sizes.task_hidden_size * whole
        costs = [0, *[universal] * sizes.num_layers, branch + into, *[branch] * (sizes.task_layers - 1)]
        costs.append(whole * MASKED_PERCENT // 100 * cls.word_flops(sizes))
        return [cost * seq_length // whole for cost in costs]

    @classmethod
    def step_flops(cls, sizes: Any, sequences: int, seq_length: int, predicted: int | None = None) -> int:
        """See ``ModelCost``. ``predicted`` is unused, because tasks predict different things."""
        return FORWARD_AND_BACKWARD * sequences * sum(cls.forward_flops(sizes, seq_length))

    def _hidden_bytes(self, width: int) -> float:
        """Return the bytes of a micro-batch's hidden states [s, width]."""
        return self.view.item_bytes * self.view.local_tokens * width

    @cached_property
    def _universal(self) -> UnitCost:
        mix, universal = self.mix, self.sizes.universal
        operators = [*self._block_for(universal, mix.understanding, generates=False)]
        operators += self._block_for(universal, mix.generation, generates=True)
        x = self._hidden_bytes(self.sizes.hidden_size)
        return UnitCost("universal", tuple(operators), x, x)

    @cached_property
    def _branches(self) -> UnitCost:
        mix, branch = self.mix, self.sizes.branch
        operators = self._block_for(branch, mix.understanding + mix.idle_understanding, generates=False)
        operators += self._block_for(branch, mix.generation + mix.idle_generation, generates=True)
        x = self._hidden_bytes(self.sizes.task_hidden_size)
        return UnitCost("branches", tuple(operators), x, x)

    @cached_property
    def _first_branches(self) -> UnitCost:
        """First layer of the branches, including the projections into them, which are replicated over mp."""
        view, H, h = self.view, self.sizes.hidden_size, self.sizes.task_hidden_size
        more = (self.mix.idle_understanding + self.mix.idle_generation) / view.samples
        rows = view.local_tokens * (1 + more)
        into = OpCost(
            "into branches",
            view.stored_bytes(rows * H),
            (Product(rows, H, h),),
            moved=view.item_bytes * rows * (2 * H + h),
            transient=view.item_bytes * rows * 2 * H,
        )
        x = self._hidden_bytes(H)
        return UnitCost("branches", (into, *self._branches.operators), x, x)

    def _block_for(self, sizes: ErnieSizes, samples: float, *, generates: bool) -> list[OpCost]:
        """Return the operators of a layer of these sizes for ``samples`` samples."""
        if not samples:
            return []
        view = replace(self.view, samples=samples)
        layer = ErnieCost(sizes, view)
        if not generates:
            return layer.block()
        segments = self.sizes.segments
        length, memory = view.seq_length // segments, self.sizes.memory
        operators = layer.block(
            tuple(AttentionMask(1, length, causal=True, memory=memory if number else 0) for number in range(segments))
        )
        remembered = 1 - 1 / segments
        if view.splits_sequence and remembered:  # each mp rank needs the whole previous segment
            size = view.item_bytes * view.tokens * sizes.hidden_size * remembered
            gathered = self._operators.communication.over_mp("all_gather", size, "forward")
            operators.append(OpCost("memory", sent=(gathered,)))
        return operators
