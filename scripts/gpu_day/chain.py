"""Synthetic text that a small decoder learns within a hundred steps, since a GPU day has no corpus or tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapar.data.sampling.samples import Sample, Samples

FIRST, WORDS = 7, 211  # ids in use; a prime, so that the walk below visits all of them
LEAP = 0.25


@dataclass(frozen=True)
class Chain:
    """Samples in which each token determines the next one, except for a random quarter.

    Attributes:
        like: Samples with the same shapes.
    """

    like: Samples

    def __len__(self) -> int:
        return len(self.like)

    def __getitem__(self, number: int) -> Sample:
        """Return a sample, which depends only on its number."""
        sample = dict(self.like[number])
        length, draws = len(sample["tokens"]), np.random.default_rng(number)
        drawn, leaps = draws.integers(0, WORDS, length + 1), draws.random(length + 1) < LEAP
        walk = drawn.copy()
        for place in range(1, length + 1):
            if not leaps[place]:
                walk[place] = (3 * walk[place - 1] + 1) % WORDS
        sample["tokens"], sample["labels"] = walk[:-1] + FIRST, walk[1:] + FIRST
        return sample
