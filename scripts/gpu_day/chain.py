"""Made text that a small decoder learns within a hundred steps: a GPU day has no corpus and no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megapar.data.sampling.samples import Sample, Samples

FIRST, WORDS = 7, 211  # ids in use; a prime, so that the walk below comes everywhere
LEAP = 0.25


@dataclass(frozen=True)
class Chain:
    """Each token names the next one, but for a quarter of them, which are drawn. like: samples of the same shapes."""

    like: Samples

    def __len__(self) -> int:
        return len(self.like)

    def __getitem__(self, number: int) -> Sample:
        """A pure function of the number, as every sample is."""
        sample = dict(self.like[number])
        length, draws = len(sample["tokens"]), np.random.default_rng(number)
        drawn, leaps = draws.integers(0, WORDS, length + 1), draws.random(length + 1) < LEAP
        walk = drawn.copy()
        for place in range(1, length + 1):
            if not leaps[place]:
                walk[place] = (3 * walk[place - 1] + 1) % WORDS
        sample["tokens"], sample["labels"] = walk[:-1] + FIRST, walk[1:] + FIRST
        return sample
