"""Forms of a published architecture's tensors, relative to the parameter table: order of rows and dims, FP8, MXFP4.

DeepSeek-V3 and Kimi-K2 publish weights in FP8 (e4m3) by blocks of 128 x 128:

    weight [R, C] in float8_e4m3fn | weight_scale_inv [ceil(R / 128), ceil(C / 128)] in float32: value = weight * scale

Blocks at the lower and right edges are smaller. Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).

GPT-OSS publishes experts in MXFP4, a scale for each 32 input features:

    blocks [E, R, C / 32, 16] in uint8, two numbers a byte, the first in its low bits | scales [E, R, C / 32] in uint8
    number: sign, two bits of exponent, one of mantissa | value = number * 2^(scale - 127)

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from megapar.core.box import Box
from megapar.errors import CheckpointError
from megapar.model.initialize import piece_box
from megapar.model.parameter import HfPiece, ParameterSpec
from megapar.model.published_tensors import BLOCK, inputs_first
from megapar.schema.published import PublishedArchitecture

_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALVES, *(-value for value in _HALVES))
"""The number of each code of four bits."""
_ROTATED = re.compile(r"\.([qk])(_proj\.(weight|bias)|_norm\.weight)$")


def export_piece(
    architecture: PublishedArchitecture, spec: ParameterSpec, piece: HfPiece, whole: Tensor
) -> tuple[str | None, Tensor]:
    """Return the class's name and content of a piece of a whole parameter; the name is None if the class lacks it.

    Raises CheckpointError if the class lacks a piece that is not zero.
    """
    part = whole[piece_box(spec, piece).slices]
    name, rotated = architecture.hf_name(piece.hf_name), rotated_dim(architecture, spec, piece)
    if name is None and bool(part.any()):
        raise CheckpointError(f"{spec.name} is not zero, and {architecture.name} has no place for it")
    if inputs_first(spec, architecture):
        return name, reversed_dims(part)
    return name, part if rotated is None else to_halves(part, rotated, spec.rotated)


def reversed_dims(x: Tensor) -> Tensor:
    """Return a view of experts [E, ..] with the dims of an expert in reverse order. Its inverse is itself."""
    return x.permute(0, *range(x.dim() - 1, 0, -1))


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks [.., C / 32, 16] in MXFP4 with scales [.., C / 32] as [.., C] in bfloat16."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).to(torch.int32)
    numbers = torch.tensor(E2M1, dtype=torch.bfloat16)[codes]
    return torch.ldexp(numbers, scales.to(torch.int32).unsqueeze(-1) - 127).to(torch.bfloat16).flatten(-2)


def rotated_dim(architecture: PublishedArchitecture, spec: ParameterSpec, piece: HfPiece) -> int | None:
    """Return the dim whose first ``spec.rotated`` rows the class stores in another order, or None."""
    if not architecture.rotary_halves or not _ROTATED.search(architecture.hf_name(piece.hf_name) or ""):
        return None
    return min(len(spec.shape) - 1, 2)  # a norm [D] or [N, D]; qkv [G, Q + 2, D, ..]


def to_pairs(x: Tensor, dim: int, rotated: int) -> Tensor:
    """Reorder the leading R = ``rotated`` rows from rotary halves to pairs: row i to 2i, row i + R / 2 to 2i + 1."""
    return _reordered(x, dim, torch.arange(rotated).view(2, -1).T.flatten())


def to_halves(x: Tensor, dim: int, rotated: int) -> Tensor:
    """Reorder the leading ``rotated`` rows from rotary pairs to rotary halves, the inverse of ``to_pairs``."""
    return _reordered(x, dim, torch.arange(rotated).view(-1, 2).T.flatten())


def _reordered(x: Tensor, dim: int, leading: Tensor) -> Tensor:
    return x.index_select(dim, torch.cat((leading, torch.arange(len(leading), x.shape[dim]))))


def stored_rows(region: Box, part: Box) -> Tensor:
    """Return the rows of the stored matrix [R, C] that ``part`` of ``region`` [.., C] consists of, flattened.

    region: Place of the stored matrix in its parameter; its leading dims are the rows.
    """
    rows = torch.zeros((), dtype=torch.int64)
    dims = zip(region.offsets[:-1], region.sizes[:-1], part.offsets[:-1], part.sizes[:-1], strict=True)
    for start, size, first, count in dims:
        rows = rows.unsqueeze(-1) * size + torch.arange(first - start, first - start + count)
    return rows.flatten()


def dequantized(values: Tensor, scales: Tensor, rows: Tensor, column: int) -> Tensor:
    """Return values [.., C'] * scales in float32, in the shape of ``values``.

    Args:
        scales: All scales of the stored matrix in float32.
        rows: The stored row of each row of ``values``, flattened.
        column: The stored column of the first column of ``values``.
    """
    wide = values.to(torch.float32)
    flat = wide.view(-1, values.shape[-1]) if values.dim() > 1 else wide.view(1, -1)
    of_rows = scales[rows // BLOCK]
    first, end = column, column + flat.shape[1]
    for block in range(first // BLOCK, -(-end // BLOCK)):
        low, high = max(block * BLOCK, first) - first, min((block + 1) * BLOCK, end) - first
        flat[:, low:high].mul_(of_rows[:, block, None])
    return wide
