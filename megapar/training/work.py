"""A step's share of a global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.data.batches import MicroBatch
from megapar.training.denominators import Denominators


@dataclass(frozen=True)
class Work:
    """What a step runs on: all that a second run of it needs to give the same.

    batches: this rank's. global_batch: samples on all ranks. first_sample, first_micro_batch: how many were read and
    run before. dropout_seed: of the random streams.
    """

    iteration: int
    batches: Sequence[MicroBatch]
    denominators: Denominators
    global_batch: int
    first_sample: int
    first_micro_batch: int
    dropout_seed: int
