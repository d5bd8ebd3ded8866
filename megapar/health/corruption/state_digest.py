"""Digests of tensors, computed at nearly the speed of memory: equal bits have equal digests.

Each block of 4 KiB is summed as 64-bit integers modulo 2**64. The remainder of a tensor after its last whole block is
copied to the digest. A single flipped bit, and any other change of a block's sum, is therefore always detected.
Elements that swap places are not detected if both are in the same block.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_KEPT = 4  # comparisons: the host learns of a difference up to two updates later
BLOCK = 1024  # 32-bit integers
_GRAIN = 1024  # elements; a piece of a tensor begins at a multiple of this


@dataclass(frozen=True)
class FlatRange:
    """A range of elements of one of several flat tensors."""

    tensor: int
    start: int
    end: int


def rotation(sizes: Sequence[int], steps: int) -> list[list[FlatRange]]:
    """Divide tensors into ``steps`` groups of nearly equal size. Small ones stay whole, so that groups may be empty."""
    starts = [0, *itertools.accumulate(sizes)]
    groups: list[list[FlatRange]] = []
    for number in range(steps):
        begin, end = (starts[-1] * n // steps for n in (number, number + 1))
        placed = enumerate(zip(starts, sizes, strict=False))
        cuts = ((i, _within(begin - at, size), _within(end - at, size)) for i, (at, size) in placed)
        groups.append([FlatRange(i, first, last) for i, first, last in cuts if first < last])
    return groups


def _within(position: int, size: int) -> int:
    """Return the cut in a tensor for a position: a multiple of the grain, or the tensor's end."""
    return size if position >= size else max(0, position) // _GRAIN * _GRAIN


class IntBlocks(NamedTuple):
    """A tensor as 32-bit integers, divided into blocks.

    Attributes:
        blocks: The whole blocks as 64-bit integers [number, BLOCK / 2]; None if there are none.
        rests: (position, integers) of the remainders before and after the blocks.
        first: Position of the first block.
    """

    blocks: Tensor | None
    rests: tuple[tuple[int, Tensor], ...]
    first: int


def int_blocks(flat: Tensor) -> IntBlocks:
    """Divide a flat, contiguous tensor into blocks.

    A bf16 tensor begins at an even element of its memory, and if its number of elements is odd, one more follows there.
    """
    if flat.element_size() == 2:
        flat = flat.as_strided((flat.numel() + flat.numel() % 2,), (1,))
    words = flat.view(torch.int32)
    first = min(int(words.storage_offset()) % 2, words.numel())  # 64-bit integers start at even positions
    number = (words.numel() - first) // BLOCK
    end = first + number * BLOCK
    blocks = words[first:end].view(torch.int64).view(number, BLOCK // 2) if number else None
    rests = ((0, words[:first]), (end, words[end:]))
    return IntBlocks(blocks, tuple((at, rest) for at, rest in rests if rest.numel()), first)


def digest_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Digest flat, contiguous tensors (``int_blocks``) on one device. Returns [n] int32; n depends only on the sizes.

    Launches one kernel for each tensor with a whole block, and one for the remainders of all tensors.
    """
    return digest_blocks([int_blocks(flat) for flat in tensors], tensors[0].device if tensors else None)


def digest_blocks(cuts: Sequence[IntBlocks], device: torch.device | None) -> Tensor:
    """Digest tensors that are divided into blocks already, as ``digest_tensors`` does."""
    counts = [0 if cut.blocks is None else len(cut.blocks) for cut in cuts]
    rests = [rest for cut in cuts for _, rest in cut.rests]
    sums = 2 * sum(counts)
    digest = torch.empty(sums + sum(rest.numel() for rest in rests), dtype=torch.int32, device=device)
    for cut, out in zip(cuts, digest[:sums].view(torch.int64).split(counts), strict=True):
        if cut.blocks is not None:
            torch.sum(cut.blocks, 1, out=out)
    if rests:
        torch.cat(rests, out=digest[sums:])
    return digest


def places(tensors: Sequence[Tensor], different: Tensor, homes: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the places at which digests differ, as (first address, address after the last). Waits for the device.

    Args:
        different: Mask over their digest [n].
        homes: Tensors of the same sizes, whose addresses are returned.
    """
    spans: list[tuple[int, int]] = []
    rests: list[tuple[int, int]] = []
    for flat, home in zip(tensors, homes, strict=True):
        address, cut = home.data_ptr(), int_blocks(flat)
        count = 0 if cut.blocks is None else len(cut.blocks)
        begins = [address + 4 * (cut.first + number * BLOCK) for number in range(count)]
        spans += [(begin, begin + 4 * BLOCK) for begin in begins for _ in range(2)]  # a sum is two integers
        singles = [at + i for at, rest in cut.rests for i in range(len(rest))]
        rests += [(address + 4 * i, address + 4 * i + 4) for i in singles]
    spans += rests
    return list(dict.fromkeys(spans[i] for i in different.nonzero().flatten().tolist()))


class _Comparison(NamedTuple):
    """A comparison of digests.

    Attributes:
        pieces: The digested pieces of tensors, on the device.
        different: Mask over their digest, on the device.
        homes: The same pieces in the memory that they stay in.
    """

    pieces: list[Tensor]
    different: Tensor
    homes: list[Tensor]


class SplitDigest(ABC):
    """Digests of a part of tensors after each update, compared before the next one, to detect corruption.

        update 1    digest part 1    ...at rest...    compare part 1    update 2    digest part 2    ...

    The parts rotate. Between two updates no code writes to the tensors, so that a changed digest means faulty memory.
    Only ``changed`` makes the host wait for the device.
    """

    def __init__(self) -> None:
        self._turn = -1
        self._comparisons: deque[list[_Comparison]] = deque(maxlen=_KEPT)

    @abstractmethod
    def digest_next(self) -> None:
        """Digest the next part. Call this after an update."""

    @abstractmethod
    def compare(self) -> Tensor | None:
        """Return a scalar on the device, true if the part has changed since then; None if nothing was compared."""

    @abstractmethod
    def compare_now(self) -> None:
        """Compare the present content, in case ``compare`` returns the result of an earlier comparison."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the part, so that the next ``compare`` has nothing to compare."""

    def changed(self) -> list[tuple[int, int]]:
        """Return the places that differed in the last comparisons, as address ranges. Waits for the device."""
        ranges = [place for update in self._comparisons for comparison in update for place in places(*comparison)]
        return list(dict.fromkeys(ranges))


class InPlaceDigest(SplitDigest):
    """Digests of tensors that stay in one memory.

    Args:
        steps: The number of updates after which every element was digested once.
        parts: The number of parts that take turns in them, evenly spread; None: as many as updates.
    """

    def __init__(self, tensors: Sequence[Tensor], steps: int, parts: int | None = None) -> None:
        super().__init__()
        self._flats = [tensor.view(-1) for tensor in tensors]
        parts = steps if parts is None else parts
        self._groups: list[list[FlatRange]] = [[] for _ in range(steps)]
        for number, group in enumerate(rotation([flat.numel() for flat in self._flats], parts)):
            self._groups[number * steps // parts] = group
        self._pieces: list[Tensor] = []
        self._blocks: list[IntBlocks] = []
        self._expected: Tensor | None = None

    def digest_next(self) -> None:
        """Digest the next part."""
        self._turn = (self._turn + 1) % len(self._groups)
        self._pieces = _pieces(self._flats, self._groups[self._turn])
        self._blocks = [int_blocks(piece) for piece in self._pieces]
        self._expected = self._digest() if self._pieces else None

    def compare(self) -> Tensor | None:
        """Digest the part again and compare."""
        if self._expected is None:
            return None
        different = self._digest() != self._expected
        self._comparisons.append([_Comparison(self._pieces, different, self._pieces)])
        return different.any()

    def compare_now(self) -> None:
        """Compare as ``compare`` does, without returning the result."""
        self.compare()

    def reset(self) -> None:
        """Forget the part."""
        self._expected = None

    def _digest(self) -> Tensor:
        return digest_blocks(self._blocks, self._pieces[0].device)


class OffloadedDigest(SplitDigest):
    """Digests of offloaded tensors: made on the device, when an update copies them there and back to host memory.

    Args:
        homes: For each part number, the tensors that are copied together, in host memory.
        steps: The number of updates after which every element was digested once.
        visit: Copies all parts to the device and calls ``arrived`` for each.
    """

    def __init__(self, homes: Sequence[Sequence[Tensor]], steps: int, visit: Callable[[], None]) -> None:
        super().__init__()
        self._turn = 0
        self._homes = [[tensor.view(-1) for tensor in home] for home in homes]
        self._visit = visit
        self._groups: list[dict[int, list[FlatRange]]] = []
        sizes = [flat.numel() for home in self._homes for flat in home]
        numbers = [(number, i) for number, home in enumerate(self._homes) for i in range(len(home))]
        for group in rotation(sizes, steps):
            ranges: dict[int, list[FlatRange]] = {}
            for piece in group:
                number, i = numbers[piece.tensor]
                ranges.setdefault(number, []).append(FlatRange(i, piece.start, piece.end))
            self._groups.append(ranges)
        self._expected: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}
        self._of_update: list[_Comparison] = []

    def arrived(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Compare a part after it was copied to the device, before the update."""
        if number in self._expected:
            ranges = self._groups[self._turn][number]
            pieces = _pieces(tensors, ranges)
            different = digest_tensors(pieces) != self._expected[number]
            self._of_update.append(_Comparison(pieces, different, _pieces(self._homes[number], ranges)))

    def leaves(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Digest a part after the update, before it is copied back to host memory."""
        ranges = self._groups[(self._turn + 1) % len(self._groups)].get(number)
        if ranges:
            self._next[number] = digest_tensors(_pieces(tensors, ranges))

    def digest_next(self) -> None:
        """Start the next turn. Call this after all parts are back in host memory."""
        self._end_update()
        self._expected, self._next = self._next, {}
        self._turn = (self._turn + 1) % len(self._groups)

    def compare(self) -> Tensor | None:
        """Return the result of the comparison in the last update."""
        last = self._comparisons[-1] if self._comparisons else []
        return torch.cat([comparison.different for comparison in last]).any() if last else None

    def compare_now(self) -> None:
        """Copy all parts to the device and compare them."""
        self._visit()
        self._end_update()

    def reset(self) -> None:
        """Forget all parts."""
        self._expected, self._next = {}, {}

    def _end_update(self) -> None:
        self._comparisons.append(self._of_update)
        self._of_update = []


def _pieces(tensors: Sequence[Tensor], ranges: Sequence[FlatRange]) -> list[Tensor]:
    return [tensors[piece.tensor].view(-1)[piece.start : piece.end] for piece in ranges]
