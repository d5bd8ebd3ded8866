"""Adaptive recompute: measure what each layer would keep, then recompute as few layers as memory allows.

    step 1    every layer recomputed; each recomputation tells what its layer would keep
    step 2    every layer recomputed; its peak is what the run needs besides
    step 3 .. peak + what the other layers keep <= memory

The sum is an upper bound: a layer that is not recomputed adds what it keeps to the memory of any moment, at most. All
ranks choose from the largest numbers of any rank, so that they recompute, and communicate, alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megapar.core.comm.autograd import all_reduce_
from megapar.core.comm.axis import Axis
from megapar.core.recompute.choice import LayerSpan
from megapar.core.units import GIBIBYTE, MEGABYTE
from megapar.errors import TrainingError

MEASURED_STEPS = 2


class Chosen(NamedTuple):
    """What was chosen. layers: those recomputed, counted on this rank. needed_bytes: the bound of the peak."""

    layers: tuple[int, ...]
    num_layers: int
    needed_bytes: int

    def __str__(self) -> str:
        return (
            f"adaptive recompute: {len(self.layers)} of {self.num_layers} layers"
            f"{' (' + ', '.join(map(str, self.layers)) + ')' if self.layers else ''}, "
            f"needs at most {self.needed_bytes / GIBIBYTE:.3g} GiB"
        )


class Adaptive:
    """The choice of ``--adaptive-recompute-device-size``. num_layers: of the whole model."""

    def __init__(self, budget_bytes: int, num_layers: int) -> None:
        self._budget = budget_bytes
        self._kept = [0] * num_layers
        self._own = 0  # layers of this rank
        self._steps = 0
        self.chosen: Chosen | None = None

    @property
    def measuring(self) -> bool:
        """The first step: recomputations are to be measured."""
        return self._steps == 0

    def spans(self, num_layers: int) -> list[LayerSpan]:
        """See ``recompute.Choice``."""
        self._own = num_layers
        layers = range(num_layers)
        return [LayerSpan(n, n + 1, self.chosen is None or n in self.chosen.layers) for n in layers]

    def note(self, layer: int, kept_bytes: int) -> None:
        """What a layer of this rank keeps for one micro-batch, beside its input."""
        self._kept[layer] = max(self._kept[layer], kept_bytes)

    def end_step(self, peak_bytes: int, in_flight: int, world: Axis, device: torch.device) -> Chosen | None:
        """The choice, after the step that makes it; None after all others.

        peak_bytes: of the run so far. in_flight: micro-batches whose activations live at once. Raises TrainingError
        where recomputing every layer needs more than there is.
        """
        self._steps += 1
        if self.chosen is not None or self._steps < MEASURED_STEPS:
            return None
        numbers = torch.tensor([peak_bytes, *self._kept], dtype=torch.int64, device=device)
        peak, *kept = all_reduce_(numbers, world, dist.ReduceOp.MAX).tolist()
        self.chosen = choose(self._budget, peak, [bytes * in_flight for bytes in kept[: self._own]])
        return self.chosen


def choose(budget_bytes: int, peak_bytes: int, kept_bytes: Sequence[int]) -> Chosen:
    """The fewest layers to recompute. peak_bytes: with every layer recomputed. kept_bytes: per layer, where it is not.

    Raises TrainingError where the peak is beyond the budget.
    """
    if peak_bytes > budget_bytes:
        raise TrainingError(
            f"--adaptive-recompute-device-size allows {budget_bytes / MEGABYTE:.6g} MB, but with every layer "
            f"recomputed the largest rank needs {-(-peak_bytes // MEGABYTE)} MB. Allow more, or choose a smaller "
            "--micro-batch-size or a larger --sharding-stage."
        )
    recomputed, needed = set(range(len(kept_bytes))), peak_bytes
    # The cheapest to keep first, so that most can be kept; of equal ones the last.
    for layer in sorted(recomputed, key=lambda layer: (kept_bytes[layer], -layer)):
        if needed + kept_bytes[layer] > budget_bytes:
            break
        recomputed.discard(layer)
        needed += kept_bytes[layer]
    return Chosen(tuple(sorted(recomputed)), len(kept_bytes), needed)
