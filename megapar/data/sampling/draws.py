"""Random numbers and permutations that are pure functions of a seed and a purpose, on every machine and version."""

from __future__ import annotations

import hashlib

from megapar.data.lazy_numpy import np


class Draws:
    """The random numbers for one purpose, for example for one sample.

    The generator is counter-based (Philox), so its cost does not depend on the sample's number. Only raw words are
    taken from numpy, which guarantees these across versions, but not its distributions.
    """

    def __init__(self, seed: int, stream: str, number: int) -> None:
        """Seed the generator for a purpose, ``stream``, and the number of a sample, below 2^64."""
        from numpy.random import Philox

        self._words = Philox(key=key_of(seed, stream) << 64 | number)

    def uniform(self, count: int) -> np.ndarray:
        """Return [count] float64 in [0, 1)."""
        return (self._words.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def integers(self, count: int, below: int) -> np.ndarray:
        """Return [count] int64 in [0, below)."""
        return (self.uniform(count) * below).astype(np.int64)

    def integer(self, below: int) -> int:
        """Return one number in [0, below)."""
        return int(self.uniform(1)[0] * below)


def key_of(seed: int, stream: str) -> int:
    """Return a 64-bit key for a seed and a purpose."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stream}".encode()).digest()[:8], "little")


_ROUNDS = 8
_MASK = (1 << 64) - 1


class Permutation:
    """A bijection of range(n) chosen by a key: a Feistel network on the next power of four, repeated until in range.

    ``permutation[i]`` takes a few microseconds for any n, and no memory in proportion to n.
    """

    def __init__(self, n: int, seed: int, stream: str) -> None:
        """Choose the permutation of ``n`` >= 1 items by ``seed`` and ``stream``."""
        if n < 1:
            raise ValueError(f"a permutation of {n} items")
        self._n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._keys = tuple(key_of(seed, f"{stream}/{r}") for r in range(_ROUNDS))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self._n:
            raise IndexError(f"{i} is not in range({self._n})")
        i = self._network(i)
        while i >= self._n:  # the network's range is at most 4 n, so this takes 4 steps on average at worst
            i = self._network(i)
        return i

    def _network(self, i: int) -> int:
        mask = (1 << self._half) - 1
        left, right = i >> self._half, i & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self._half | right


def _mixed(x: int) -> int:
    """Apply the finalizer of SplitMix64, so that every bit of the result depends on every bit of ``x``."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
