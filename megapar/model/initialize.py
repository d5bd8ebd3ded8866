"""Initial weights, independent of the parallel layout.

Each tensor with a Hugging Face name is drawn in blocks of 64 rows by a CPU generator, normal in fp32 and then cast. The
seed of a block is the first 8 bytes (little endian) of SHA-256 of "seed/name/block". A rank draws only the blocks that
overlap its shard.

Weights that write into the residual stream may be scaled down with depth, so that the sum of 2 L products starts with
the variance of one (GPT-2). Megatron-LM always does this; Hugging Face and ERNIE never do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import product
from math import prod

import torch
from torch import Tensor

from megapar.core.box import Box
from megapar.model.parameter import HfPiece, ParameterSpec
from megapar.model.sizes import ModelSizes

ROWS_PER_BLOCK = 64


@torch.no_grad()
def fill(target: Tensor, spec: ParameterSpec, box: Box, *, seed: int, init_std: float) -> None:
    """Write the initial values of ``box``, a part of one parameter, into ``target`` [box.sizes]."""
    if spec.init == "ones":
        target.fill_(1.0)
    elif spec.init == "zeros":
        target.zero_()
    elif spec.init == "normal":
        for piece in spec.pieces:
            _fill_piece(target, spec, piece, box, seed, init_std)
    else:
        raise ValueError(f"{spec.name} has an unknown initialization, {spec.init!r}; use normal, ones or zeros")


def std_of(spec: ParameterSpec, sizes: ModelSizes) -> float:
    """Return the standard deviation of a parameter's initial values."""
    shrinks = sizes.depth_scaled_init and spec.residual
    std = sizes.init_std * spec.init_factor
    return std / math.sqrt(2 * sizes.num_blocks) if shrinks else std


def draw_block(seed: int, name: str, block: int, shape: tuple[int, ...], init_std: float) -> Tensor:
    """Draw block ``block`` of the tensor ``name``: normal(0, init_std) in fp32, always on the CPU."""
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    # torch accepts 64-bit seeds, signed or unsigned.
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, init_std, generator=generator)


def _fill_piece(target: Tensor, spec: ParameterSpec, piece: HfPiece, box: Box, seed: int, init_std: float) -> None:
    """Write the overlap of one Hugging Face tensor with ``box``, one run of rows at a time.

    The piece is a region of the parameter with dims [.., inner rows, columns..], which the Hugging Face tensor
    flattens to [rows, columns]. A run is the part of ``inner rows`` inside the box at one index of the dims before.
    """
    region = piece_box(spec, piece)
    part = region.meet(box)
    if part is None:
        return
    row_dims = _row_dims(region, piece)
    kept, inside = part.slices, part.within(region)
    into = part.within(box)
    columns = tuple(inside[row_dims + 1 :])
    blocks = _Blocks(piece, seed, init_std)
    for outer in product(*(range(s.start, s.stop) for s in inside[:row_dims])):
        first = 0
        for index, size in zip(outer, region.sizes, strict=False):
            first = first * size + index
        first = first * region.sizes[row_dims] + inside[row_dims].start
        target_index = tuple(into[d].start + i - inside[d].start for d, i in enumerate(outer))
        rows = target[target_index][into[row_dims]]
        count = kept[row_dims].stop - kept[row_dims].start
        for offset, values in blocks.rows(first, count, region.sizes[row_dims + 1 :]):
            length = values.shape[0]
            destination, drawn = (slice(offset, offset + length), *into[row_dims + 1 :]), (slice(None), *columns)
            rows[destination] = values[drawn].to(target.dtype)


def piece_box(spec: ParameterSpec, piece: HfPiece) -> Box:
    """Return the region of the parameter that this Hugging Face tensor covers, with all dims of the parameter."""
    return Box.at(spec.shape, piece.index)


def _row_dims(region: Box, piece: HfPiece) -> int:
    """Return the last dim of the region that the first dim of the Hugging Face tensor includes."""
    for dim in range(len(region.sizes)):
        if prod(region.sizes[: dim + 1]) == piece.hf_shape[0] and prod(region.sizes[dim + 1 :]) == prod(
            piece.hf_shape[1:]
        ):
            return dim
    raise ValueError(f"{piece.hf_name} {piece.hf_shape} does not flatten {region.sizes} by leading dims")


class _Blocks:
    """Blocks of one Hugging Face tensor. Read in ascending order, each is drawn once."""

    def __init__(self, piece: HfPiece, seed: int, init_std: float) -> None:
        self.piece, self.seed, self.init_std = piece, seed, init_std
        self.number, self.values = -1, torch.empty(0)

    def rows(self, first: int, count: int, tail: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
        """Yield rows first .. first + count as (offset from ``first``, values [n, *tail]), block by block."""
        done = 0
        while done < count:
            block, start = divmod(first + done, ROWS_PER_BLOCK)
            values = self._block(block)[start : start + count - done]
            yield done, values.reshape(values.shape[0], *tail)
            done += values.shape[0]

    def _block(self, block: int) -> Tensor:
        if block != self.number:
            rows = min(ROWS_PER_BLOCK, self.piece.hf_shape[0] - block * ROWS_PER_BLOCK)
            shape = (rows, *self.piece.hf_shape[1:])
            self.values = draw_block(self.seed, self.piece.hf_name, block, shape, self.init_std)
            self.number = block
        return self.values
