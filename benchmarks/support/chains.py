"""Sequences that a small decoder learns in a few hundred steps: each word follows from the two before it, by chance."""

from __future__ import annotations

import numpy as np

LENGTH, WORDS = 64, 64


class Chains:
    """Sequences of a random chain: a word follows from the two before it, by one of four with unequal chances.

    Args:
        count: Number of sequences.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = np.random.default_rng(1).integers(WORDS, size=(WORDS, 4, 4))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> np.ndarray:
        draw = np.random.default_rng((2, number))
        choices, words = draw.choice(4, size=LENGTH + 1, p=(0.7, 0.15, 0.1, 0.05)), [int(draw.integers(WORDS)), 0]
        for choice in choices[1:]:
            words.append(int(self._next[words[-1], words[-2] % 4, choice]))
        return np.array(words[: LENGTH + 1])
