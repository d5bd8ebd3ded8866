"""The position of a run: steps done, samples and tokens read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Progress of a run.

    Attributes:
        iteration: Steps done.
        consumed_samples: Samples read so far.
        consumed_tokens: Tokens read so far, without padding.
        micro_batches: Micro-batches run so far, on all data ranks together.
        dropout_seed: Seed of the random streams.
        skipped_steps: Steps that changed nothing, because they overflowed or were bad.
        ampipe_degree: Degree measured at the start. 0 if not measured.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    micro_batches: int = 0
    dropout_seed: int = 0
    skipped_steps: int = 0
    ampipe_degree: int = 0
