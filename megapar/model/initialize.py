"""Initial weights that do not depend on the layout.

The unit is the Hugging-Face-named tensor, drawn in blocks of 64 rows by a CPU generator whose seed is the first 8 bytes
(little endian) of SHA-256 of "seed/name/block", normal in fp32 and then cast. A rank draws only the blocks that its
piece touches.

A weight that writes into the residual stream may start smaller, the deeper the model is: so that the sum of what 2 L
products add starts as large as what one would (GPT-2). Megatron-LM does this always, Hugging Face and ERNIE never.
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
    """Writes the initial value of ``box`` of one parameter into ``target``, a tensor of the box's sizes."""
    if spec.init == "ones":
        target.fill_(1.0)
    elif spec.init == "zeros":
        target.zero_()
    elif spec.init == "normal":
        for piece in spec.pieces:
            _fill_piece(target, spec, piece, box, seed, init_std)
    else:
        raise ValueError(f"{spec.name} asks for an unknown initialisation, {spec.init!r}")


def std_of(spec: ParameterSpec, sizes: ModelSizes) -> float:
    """The standard deviation that a parameter is drawn with."""
    shrinks = sizes.depth_scaled_init and spec.residual
    return sizes.init_std / math.sqrt(2 * sizes.num_blocks) if shrinks else sizes.init_std


def draw_block(seed: int, name: str, block: int, shape: tuple[int, ...], init_std: float) -> Tensor:
    """Block ``block`` of the tensor ``name``: normal(0, init_std) in fp32 on the CPU, whatever runs elsewhere."""
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    # torch takes seeds of 64 bits, signed or not.
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, init_std, generator=generator)


def _fill_piece(target: Tensor, spec: ParameterSpec, piece: HfPiece, box: Box, seed: int, init_std: float) -> None:
    """Copies the part of one Hugging Face tensor that lies in ``box``, run of rows by run of rows.

    The piece is a region of the parameter with dims [.., inner rows, columns..], which the Hugging Face tensor
    flattens to [rows, columns]. A run is what the box keeps of ``inner rows`` at one setting of the dims before.
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
        here = tuple(into[d].start + i - inside[d].start for d, i in enumerate(outer))
        rows = target[here][into[row_dims]]
        count = kept[row_dims].stop - kept[row_dims].start
        for offset, values in blocks.rows(first, count, region.sizes[row_dims + 1 :]):
            length = values.shape[0]
            there, drawn = (slice(offset, offset + length), *into[row_dims + 1 :]), (slice(None), *columns)
            rows[there] = values[drawn].to(target.dtype)


def piece_box(spec: ParameterSpec, piece: HfPiece) -> Box:
    """The region of the parameter that is this Hugging Face tensor, with all the parameter's dims."""
    offsets, sizes = [0] * len(spec.shape), list(spec.shape)
    for dim, index in enumerate(piece.index):
        if isinstance(index, int):
            offsets[dim], sizes[dim] = index, 1
        else:
            start, stop, _ = index.indices(spec.shape[dim])
            offsets[dim], sizes[dim] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))


def _row_dims(region: Box, piece: HfPiece) -> int:
    """The dim of the region at which the first dim of the Hugging Face tensor ends."""
    for dim in range(len(region.sizes)):
        if prod(region.sizes[: dim + 1]) == piece.hf_shape[0] and prod(region.sizes[dim + 1 :]) == prod(
            piece.hf_shape[1:]
        ):
            return dim
    raise ValueError(f"{piece.hf_name} {piece.hf_shape} does not flatten {region.sizes} by leading dims")


class _Blocks:
    """The blocks of one Hugging Face tensor, read in ascending order: each is drawn once."""

    def __init__(self, piece: HfPiece, seed: int, init_std: float) -> None:
        self.piece, self.seed, self.init_std = piece, seed, init_std
        self.number, self.values = -1, torch.empty(0)

    def rows(self, first: int, count: int, tail: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
        """Rows first .. first + count as (offset into them, values [n, *tail]), block by block."""
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
