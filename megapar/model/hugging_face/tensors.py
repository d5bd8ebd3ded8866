"""Tensors of a published architecture's folders against the parameter table: their names and the order of their rows.

The table's own Hugging Face names and order are those of Ernie4_5 and Ernie. A ``PublishedArchitecture`` says where a
class differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from megapar.errors import CheckpointError
from megapar.model.initialize import piece_box
from megapar.model.parameter import HfPiece, ParameterSpec
from megapar.schema.published import PublishedArchitecture

_ROTATED = re.compile(r"\.([qk])(_proj\.(weight|bias)|_norm\.weight)$")


def pieces_of(
    table: Iterable[ParameterSpec], architecture: PublishedArchitecture
) -> dict[str, tuple[ParameterSpec, HfPiece]]:
    """Name in the class's folders -> the parameter and its piece, in the table's order."""
    found: dict[str, tuple[ParameterSpec, HfPiece]] = {}
    for spec in table:
        for piece in spec.pieces:
            name = architecture.hf_name(piece.hf_name)
            if name is not None:
                found[name] = (spec, piece)
    return found


def outward(
    architecture: PublishedArchitecture, spec: ParameterSpec, piece: HfPiece, whole: Tensor
) -> tuple[str | None, Tensor]:
    """Name and content of a piece of a whole parameter as the class's folders have them; None for a piece they lack.

    Raises CheckpointError for content that they have no place for.
    """
    part = whole[piece_box(spec, piece).slices]
    name, rotated = architecture.hf_name(piece.hf_name), rotated_dim(architecture, spec, piece)
    if name is None and bool(part.any()):
        raise CheckpointError(f"{spec.name} is not zero, and {architecture.name} has no place for it")
    return name, part if rotated is None else to_halves(part, rotated)


def rotated_dim(architecture: PublishedArchitecture, spec: ParameterSpec, piece: HfPiece) -> int | None:
    """The dim of the parameter whose rows this piece stores in another order; None where the order is the same."""
    if not architecture.rotary_halves or not _ROTATED.search(architecture.hf_name(piece.hf_name) or ""):
        return None
    return 0 if len(spec.shape) == 1 else 2  # a norm [D]; qkv [G, Q + 2, D, ..]


def to_pairs(x: Tensor, dim: int) -> Tensor:
    """Rows in halves to rows in pairs: row i to 2i, row i + D / 2 to 2i + 1."""
    return x.index_select(dim, torch.arange(x.shape[dim]).view(2, -1).T.flatten())


def to_halves(x: Tensor, dim: int) -> Tensor:
    """The inverse of ``to_pairs``."""
    return x.index_select(dim, torch.arange(x.shape[dim]).view(-1, 2).T.flatten())
