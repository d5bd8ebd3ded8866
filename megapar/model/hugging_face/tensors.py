"""Row order of a published architecture's tensors, relative to the parameter table."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from megapar.errors import CheckpointError
from megapar.model.initialize import piece_box
from megapar.model.parameter import HfPiece, ParameterSpec
from megapar.schema.published import PublishedArchitecture

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
    return name, part if rotated is None else to_halves(part, rotated, spec.rotated)


def rotated_dim(architecture: PublishedArchitecture, spec: ParameterSpec, piece: HfPiece) -> int | None:
    """Return the dim of the parameter whose rows the class stores in another order; None if the order is the same.

    Only the leading ``spec.rotated`` rows of that dim are in another order.
    """
    if not architecture.rotary_halves or not _ROTATED.search(architecture.hf_name(piece.hf_name) or ""):
        return None
    return len(spec.shape) - 1 if spec.init == "ones" else 2  # a norm [D] or [N, D]; qkv [G, Q + 2, D, ..]


def to_pairs(x: Tensor, dim: int, rotated: int) -> Tensor:
    """Reorder the leading R = ``rotated`` rows from rotary halves to pairs: row i to 2i, row i + R / 2 to 2i + 1."""
    return _reordered(x, dim, torch.arange(rotated).view(2, -1).T.flatten())


def to_halves(x: Tensor, dim: int, rotated: int) -> Tensor:
    """Reorder the leading ``rotated`` rows from rotary pairs to rotary halves, the inverse of ``to_pairs``."""
    return _reordered(x, dim, torch.arange(rotated).view(-1, 2).T.flatten())


def _reordered(x: Tensor, dim: int, leading: Tensor) -> Tensor:
    return x.index_select(dim, torch.cat((leading, torch.arange(len(leading), x.shape[dim]))))
