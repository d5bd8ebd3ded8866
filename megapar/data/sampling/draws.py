"""Random numbers that are pure functions of (seed, number): the same on every rank, machine and library version."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Draws:
    """The random numbers for one purpose, for example for one sample.

    The generator is counter-based (Philox), so its cost does not depend on the sample's number. Only raw words are
    taken from numpy, which guarantees these across versions, but not its distributions.
    """

    def __init__(self, seed: int, stream: str, number: int) -> None:
        """Seed the generator.

        Args:
            stream: Purpose of the numbers.
            number: Number of the sample, below 2^64.
        """
        from numpy.random import Philox

        self._words = Philox(key=key_of(seed, stream) << 64 | number)

    def uniform(self, count: int) -> np.ndarray:
        """Return [count] float64 in [0, 1)."""
        import numpy as np

        numbers: np.ndarray = (self._words.random_raw(count) >> np.uint64(11)) * 2.0**-53
        return numbers

    def integers(self, count: int, below: int) -> np.ndarray:
        """Return [count] int64 in [0, below)."""
        import numpy as np

        return (self.uniform(count) * below).astype(np.int64)

    def integer(self, below: int) -> int:
        """Return one number in [0, below)."""
        return int(self.uniform(1)[0] * below)


def key_of(seed: int, stream: str) -> int:
    """Return a 64-bit key for a seed and a purpose."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stream}".encode()).digest()[:8], "little")
