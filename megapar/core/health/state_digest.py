"""Digests of tensors at rest: equal for equal bits, made at nearly the speed at which memory is read.

Blocks of 4 KiB are added up as 64-bit integers, modulo 2**64, one sum a block; what is left of a tensor behind its
last whole block stands in the digest as it is. So a flipped bit shows for certain, and so does whatever else alters
the sum of a block; of elements that change places, only those that stay within one block do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1024  # 32-bit integers
_GRAIN = 1024  # elements: pieces of a tensor begin at a multiple


@dataclass(frozen=True)
class FlatRange:
    """A range of elements of one of several tensors."""

    tensor: int
    start: int
    end: int


def rotation(sizes: Sequence[int], steps: int) -> list[list[FlatRange]]:
    """``steps`` groups of pieces, nearly the same number of elements in each, that have every element once.

    sizes: elements of the tensors. Small ones are not cut, so that groups may be empty.
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
    """Where a cut falls in a tensor: on a multiple of the grain, or at its end."""
    return size if position >= size else max(0, position) // _GRAIN * _GRAIN


class _IntBlocks(NamedTuple):
    """A tensor as 32-bit integers. blocks: of them whole ones. rests: (where it begins, what is in no block)."""

    blocks: Tensor | None
    rests: tuple[tuple[int, Tensor], ...]
    first: int  # of the blocks


def _cut(flat: Tensor) -> _IntBlocks:
    words = flat.view(torch.int32)
    first = min(int(words.storage_offset()) % 2, words.numel())  # 64-bit integers lie at even places
    number = (words.numel() - first) // BLOCK
    end = first + number * BLOCK
    blocks = words[first:end].view(torch.int64).view(number, BLOCK // 2) if number else None
    rests = ((0, words[:first]), (end, words[end:]))
    return _IntBlocks(blocks, tuple((at, rest) for at, rest in rests if rest.numel()), first)


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Of flat, contiguous tensors of fp32 or fp64 on one device; [n] int32, of n that hangs on their sizes alone.

    One kernel for each tensor that has a whole block, and one for the rest of them all.
    """
    cuts = [_cut(flat) for flat in tensors]
    counts = [0 if cut.blocks is None else len(cut.blocks) for cut in cuts]
    rests = [rest for cut in cuts for _, rest in cut.rests]
    device = tensors[0].device if tensors else None
    sums = 2 * sum(counts)
    found = torch.empty(sums + sum(rest.numel() for rest in rests), dtype=torch.int32, device=device)
    for cut, out in zip(cuts, found[:sums].view(torch.int64).split(counts), strict=True):
        if cut.blocks is not None:
            torch.sum(cut.blocks, 1, out=out)
    if rests:
        torch.cat(rests, out=found[sums:])
    return found


def places(tensors: Sequence[Tensor], different: Tensor, homes: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where digests differ: (first address, the one behind the last) of each place, in bytes. Waits for the device.

    different: [n] bool, beside the digest of the tensors. homes: whose addresses these are, of the same sizes.
    """
    spans: list[tuple[int, int]] = []
    rests: list[tuple[int, int]] = []
    for flat, home in zip(tensors, homes, strict=True):
        address, cut = home.data_ptr(), _cut(flat)
        count = 0 if cut.blocks is None else len(cut.blocks)
        begins = [address + 4 * (cut.first + number * BLOCK) for number in range(count)]
        spans += [(begin, begin + 4 * BLOCK) for begin in begins for _ in range(2)]  # a sum is two integers
        singles = [at + i for at, rest in cut.rests for i in range(len(rest))]
        rests += [(address + 4 * i, address + 4 * i + 4) for i in singles]
    spans += rests
    return list(dict.fromkeys(spans[i] for i in different.nonzero().flatten().tolist()))
