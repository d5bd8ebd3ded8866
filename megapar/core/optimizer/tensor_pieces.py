"""The pieces of Hugging Face tensors that master shards consist of.

shard | piece of q | of k | of v | of o_proj | padding |
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapar.core.box import Box
from megapar.core.device.tensor_piece import ShardPieces, TensorPiece, dot
from megapar.core.random import stream_seed
from megapar.core.sharding.cut import ParameterInfo
from megapar.core.sharding.master_shard import ParameterView
from megapar.core.sharding.sharding import Sharding


def tensor_key(seed: int, name: str) -> int:
    """Return the 63-bit key of a Hugging Face tensor in a run, for the random numbers of its roundings."""
    return stream_seed(seed, "rounding", name)


@dataclass(frozen=True)
class TensorRegion:
    """A region of a parameter: one Hugging Face tensor, flattened in row-major order. ``key``: its ``tensor_key``."""

    box: Box
    key: int


def pieces_of(sharding: Sharding, regions: Callable[[ParameterInfo], Sequence[TensorRegion]]) -> list[ShardPieces]:
    """Return the pieces of each master shard. ``regions`` of a parameter cover it."""
    masters = [shard.master for shard in sharding.master_shards]
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for number, master in enumerate(masters):
        storage, begin = _address(master)
        spans.setdefault(storage, []).append((begin, master.numel(), number))
    for found in spans.values():
        found.sort()
    pieces: list[list[TensorPiece]] = [[] for _ in masters]
    for view in sharding.views(masters):
        if view.tensor.numel():
            storage, at = _address(view.tensor)
            begin, _, number = spans[storage][bisect_right(spans[storage], (at, sys.maxsize, 0)) - 1]
            pieces[number] += _pieces(view, regions(view.spec), begin)
    return [ShardPieces(tuple(each)) for each in pieces]


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _pieces(view: ParameterView, regions: Sequence[TensorRegion], begin: int) -> Iterator[TensorPiece]:
    """Yield the pieces of a parameter in the shard whose memory begins at ``begin``."""
    for region in regions:
        part = region.box.meet(view.box)
        if part is None:
            continue
        local = view.tensor[part.within(view.box)]
        steps = _row_major(region.box.sizes)
        index = dot([at - zero for at, zero in zip(part.offsets, region.box.offsets, strict=True)], steps)
        dims = _merged(list(zip(part.sizes, local.stride(), steps, strict=True)))
        sizes, strides, steps = zip(*dims, strict=True)
        yield TensorPiece(region.key, int(local.storage_offset()) - begin, sizes, strides, index, steps)


def _merged(dims: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return dims (size, stride, step) with those that are contiguous in memory and tensor as one; at least one."""
    merged: list[tuple[int, int, int]] = []
    for size, stride, step in dims:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * stride, size * step):
            merged[-1] = merged[-1][0] * size, stride, step
        else:
            merged.append((size, stride, step))
    return merged or [(1, 1, 1)]


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
