"""What the loss terms of a global batch are divided by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.axis import Axis
from megapar.core.comm.meter import WaitMeter
from megapar.data.batches import MicroBatch


class Denominators:
    """Labels of each term, and tokens that are not padding, of the global batch; counted from the labels.

    The sum over the data ranks is launched here and waited for at the first use, after the first forward: at the start
    of a step, when parameters are in flight, a small message would have to wait for them.

    batches: this rank's. num_micro_batches: of the global batch, on all data ranks together.
    """

    def __init__(self, batches: Sequence[MicroBatch], num_micro_batches: int, data: Axis, meter: WaitMeter) -> None:
        self.num_micro_batches = num_micro_batches
        self._names = sorted(batches[0].counts)
        self._meter = meter
        self._kind = f"{data.name}/counts"
        own = [sum(batch.counts[name] for batch in batches) for name in self._names]
        self._counts = torch.tensor([*own, sum(batch.valid_tokens for batch in batches)], dtype=torch.int64)
        self._work = reduce_numbers(self._counts, data, "counts", async_op=True)

    @property
    def items(self) -> dict[str, int]:
        """Term -> how many labels count for it."""
        return dict(zip(self._names, self._settled(), strict=False))

    @property
    def tokens(self) -> int:
        """Tokens of the global batch, without padding."""
        return self._settled()[-1]

    def _settled(self) -> list[int]:
        if self._work is not None:
            self._meter.wait(self._work, self._kind)
            self._work = None
        counts: list[int] = self._counts.tolist()
        return counts
