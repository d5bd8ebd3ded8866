"""Arithmetic of axis-aligned boxes: every local tensor of megapar is one box of its global tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """An axis-aligned piece of a tensor.

    Attributes:
        offsets: First index along each dim.
        sizes: Length along each dim, which may be 0.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, shape: Sequence[int], index: Sequence[int | slice]) -> Box:
        """Return the box of an index into a tensor of this shape; an int keeps its dim, with length 1."""
        offsets, sizes = [0] * len(shape), list(shape)
        for dim, places in enumerate(index):
            start, stop = (places, places + 1) if isinstance(places, int) else places.indices(shape[dim])[:2]
            offsets[dim], sizes[dim] = start, stop - start
        return cls(tuple(offsets), tuple(sizes))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def cut(self, dim: int, parts: int, part: int) -> Box:
        """Return piece ``part`` of ``parts`` along ``dim`` as of ``torch.chunk``: the last may be shorter or empty."""
        length = -(-self.sizes[dim] // parts)
        start = min(part * length, self.sizes[dim])
        return self.with_dim(dim, self.offsets[dim] + start, min(length, self.sizes[dim] - start))

    def with_dim(self, dim: int, offset: int, size: int) -> Box:
        """Return the box with another offset and size along ``dim``."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = offset, size
        return Box(tuple(offsets), tuple(sizes))

    def slabs(self, numel: int, whole_from: int | None = None) -> Iterator[Box]:
        """Yield consecutive pieces in row-major order, of at most ``numel`` elements if possible.

        Args:
            numel: Maximum number of elements.
            whole_from: Never cut this dim and those after it.
        """
        dims = range(len(self.sizes) if whole_from is None else whole_from)
        dim = next((dim for dim in dims if self.sizes[dim] > 1), None)
        if dim is None or self.numel <= numel:
            yield self
            return
        step = max(1, numel // prod(self.sizes[dim + 1 :]))
        for start in range(0, self.sizes[dim], step):
            slab = self.with_dim(dim, self.offsets[dim] + start, min(step, self.sizes[dim] - start))
            if step == 1:  # A single index may still be too large.
                yield from slab.slabs(numel, whole_from)
            else:
                yield slab

    def meet(self, other: Box) -> Box | None:
        """Return the intersection of two boxes of one tensor, or None if it is empty."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(
            min(a + s, b + t) for a, s, b, t in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(e - o for o, e in zip(offsets, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return this box as an index into a tensor of the box ``outer``, which must contain it."""
        return tuple(slice(o - b, o - b + s) for o, b, s in zip(self.offsets, outer.offsets, self.sizes, strict=True))
