"""Digests of tensors, computed at nearly the speed of memory: equal bits have equal digests.

Each block of 4 KiB is summed as 64-bit integers modulo 2**64. The remainder of a tensor after its last whole block is
copied to the digest. A single flipped bit, and any other change of a block's sum, is therefore always detected.
Elements that swap places are not detected if both are in the same block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024  # 32-bit integers
_GRAIN = 1024  # elements; a piece of a tensor begins at a multiple of this


@dataclass(frozen=True)
class FlatRange:
    """A range of elements of one of several flat tensors.

    Attributes:
        tensor: Its index.
        start: The first element.
        end: The element after the last.
    """

    tensor: int
    start: int
    end: int


def rotation(sizes: Sequence[int], steps: int) -> list[list[FlatRange]]:
    """Divide tensors into ``steps`` groups of pieces with nearly equal numbers of elements.

    Small tensors are not cut, so that a group may be empty.

    Args:
        sizes: The number of elements of each tensor.
        steps: The number of groups.
    """
    starts = [0, *itertools.accumulate(sizes)]
    groups: list[list[FlatRange]] = []
    for number in range(steps):
        begin, end = (starts[-1] * n // steps for n in (number, number + 1))
        cuts = ((i, _within(begin - at, size), _within(end - at, size)) for i, (at, size) in _numbered(starts, sizes))
        groups.append([FlatRange(i, first, last) for i, first, last in cuts if first < last])
    return groups


def _numbered(starts: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(starts, sizes, strict=False))


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
    """Divide a flat, contiguous fp32 or fp64 tensor into blocks."""
    words = flat.view(torch.int32)
    first = min(int(words.storage_offset()) % 2, words.numel())  # 64-bit integers start at even positions
    number = (words.numel() - first) // BLOCK
    end = first + number * BLOCK
    blocks = words[first:end].view(torch.int64).view(number, BLOCK // 2) if number else None
    rests = ((0, words[:first]), (end, words[end:]))
    return IntBlocks(blocks, tuple((at, rest) for at, rest in rests if rest.numel()), first)


def digest_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Digest flat, contiguous fp32 or fp64 tensors on one device. Returns [n] int32; n depends only on the sizes.

    Launches one kernel for each tensor with a whole block, and one for the remainders of all tensors.
    """
    return digest_blocks([int_blocks(flat) for flat in tensors], tensors[0].device if tensors else None)


def digest_blocks(cuts: Sequence[IntBlocks], device: torch.device | None) -> Tensor:
    """Digest tensors that are divided into blocks already, as ``digest_tensors`` does."""
    counts = [0 if cut.blocks is None else len(cut.blocks) for cut in cuts]
    rests = [rest for cut in cuts for _, rest in cut.rests]
    sums = 2 * sum(counts)
    found = torch.empty(sums + sum(rest.numel() for rest in rests), dtype=torch.int32, device=device)
    for cut, out in zip(cuts, found[:sums].view(torch.int64).split(counts), strict=True):
        if cut.blocks is not None:
            torch.sum(cut.blocks, 1, out=out)
    if rests:
        torch.cat(rests, out=found[sums:])
    return found


def places(tensors: Sequence[Tensor], different: Tensor, homes: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the places at which digests differ, as (first address, address after the last). Waits for the device.

    Args:
        tensors: The digested tensors.
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
