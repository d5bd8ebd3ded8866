"""Own data whose predictions count differently: random ids, and weights of which many are neither 0 nor 1."""

from __future__ import annotations

from typing import Any

import numpy as np

WEIGHTS = (0.0, 0.25, 0.5, 1.0, 1.7)


class WeightedSequences:
    """Sequences of up to ``longest`` ids below ``ids``; every fourth one has no weights. ``first`` tells two apart."""

    def __init__(self, longest: int, ids: int, first: int = 0) -> None:
        self._longest, self._ids, self._first = longest, ids, first

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> Any:
        draws = np.random.default_rng((self._first, number))
        tokens = draws.integers(self._ids, size=self._longest - number % 3)
        if number % 4 == 0:
            return tokens
        return {"tokens": tokens, "weights": draws.choice(WEIGHTS, len(tokens))}
