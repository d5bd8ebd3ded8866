"""Denominators of the loss terms: label weights and token counts of the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.axis import Axis
from megapar.data.batches import MicroBatch


class Denominators:
    """Sums over the labels' weights of each loss term, and the tokens that are not padding, of the global batch.

    Labels without weights count 1 each. The sums are in fp64, in which counts are exact.

    The constructor launches the sum over the data ranks. The first use, after the first forward, waits for it: at the
    start of a step, while parameters are in flight, a small message would have to wait for them.

    Args:
        batches: Micro-batches of this rank.
        num_micro_batches: Micro-batches of the global batch, on all data ranks together.
        data: The data axis.
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
