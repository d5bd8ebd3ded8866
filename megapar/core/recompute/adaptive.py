"""Adaptive recompute: measure the activations of each layer, then recompute as few layers as memory allows.

    step 1    every layer recomputed; each recomputation reports the bytes its layer would keep
    step 2    every layer recomputed; its peak is the memory that the run needs anyway
    step 3 .. peak + bytes of the layers that are not recomputed <= memory

The sum is an upper bound: a layer that is not recomputed adds at most its kept bytes to memory at any moment. All ranks
choose from the maximum over ranks, so that they recompute, and communicate, identically.
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
    """The result of the choice.

    Attributes:
        layers: The recomputed layers, numbered on this rank.
        needed_bytes: Upper bound of the peak.
    """

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
    """The choice made by ``--adaptive-recompute-device-size``."""

    def __init__(self, budget_bytes: int, num_layers: int) -> None:
        self._budget = budget_bytes
        self._kept = [0] * num_layers
        self._num_layers = 0  # layers of this rank
        self._steps = 0
        self.chosen: Chosen | None = None

    @property
    def measuring(self) -> bool:
        """True in the first step, while recomputations must be measured."""
        return self._steps == 0

    def spans(self, num_layers: int) -> list[LayerSpan]:
        self._num_layers = num_layers
        layers = range(num_layers)
        return [LayerSpan(n, n + 1, self.chosen is None or n in self.chosen.layers) for n in layers]

    def note(self, layer: int, kept_bytes: int) -> None:
        """Record the bytes that a layer of this rank keeps for one micro-batch, in addition to its input."""
        self._kept[layer] = max(self._kept[layer], kept_bytes)

    def end_step(self, peak_bytes: int, in_flight: int, world: Axis, device: torch.device) -> Chosen | None:
        """Count a step; return the choice after the step that makes it, None after all others.

        ``in_flight`` is the number of micro-batches whose activations are kept at once. Raises TrainingError if
        recomputing every layer still exceeds the budget.
        """
        self._steps += 1
        if self.chosen is not None or self._steps < MEASURED_STEPS:
            return None
        numbers = torch.tensor([peak_bytes, *self._kept], dtype=torch.int64, device=device)
        peak, *kept = all_reduce_(numbers, world, dist.ReduceOp.MAX).tolist()
        self.chosen = choose(self._budget, peak, [bytes * in_flight for bytes in kept[: self._num_layers]])
        return self.chosen


def choose(budget_bytes: int, peak_bytes: int, kept_bytes: Sequence[int]) -> Chosen:
    """Choose as few layers as possible to recompute. Raises TrainingError if the peak exceeds the budget.

    Args:
        peak_bytes: Peak with every layer recomputed.
        kept_bytes: For each layer, the bytes that it keeps if it is not recomputed.
    """
    if peak_bytes > budget_bytes:
        raise TrainingError(
            f"--adaptive-recompute-device-size allows {budget_bytes / MEGABYTE:.6g} MB, but with every layer "
            f"recomputed the largest rank needs {-(-peak_bytes // MEGABYTE)} MB. Allow more, or choose a smaller "
            "--micro-batch-size or a larger --sharding-stage."
        )
    recomputed, needed = set(range(len(kept_bytes))), peak_bytes
    # Cheapest layers first, so that as many as possible are kept; among equal ones the last.
    for layer in sorted(recomputed, key=lambda layer: (kept_bytes[layer], -layer)):
        if needed + kept_bytes[layer] > budget_bytes:
            break
        recomputed.discard(layer)
        needed += kept_bytes[layer]
    return Chosen(tuple(sorted(recomputed)), len(kept_bytes), needed)
