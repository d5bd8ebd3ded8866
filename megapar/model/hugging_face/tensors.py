"""Names and row order of a published architecture's tensors, relative to the parameter table.

The table has the Hugging Face names and the row order of Ernie4_5 and Ernie. A ``PublishedArchitecture`` describes how
a class differs.

Tested in ``tests/model/hugging_face/test_save.py``.
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
    """Map each tensor name of the class to the parameter and its piece, in the table's order."""
    pieces: dict[str, tuple[ParameterSpec, HfPiece]] = {}
    for spec in table:
        for piece in spec.pieces:
            name = architecture.hf_name(piece.hf_name)
            if name is not None:
                pieces[name] = (spec, piece)
    return pieces


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
    return name, part if rotated is None else to_halves(part, rotated)


def rotated_dim(architecture: PublishedArchitecture, spec: ParameterSpec, piece: HfPiece) -> int | None:
    """Return the dim of the parameter whose rows the class stores in another order; None if the order is the same."""
    if not architecture.rotary_halves or not _ROTATED.search(architecture.hf_name(piece.hf_name) or ""):
        return None
    return 0 if len(spec.shape) == 1 else 2  # a norm [D]; qkv [G, Q + 2, D, ..]


def to_pairs(x: Tensor, dim: int) -> Tensor:
    """Reorder rows from rotary halves to rotary pairs: row i to 2i, row i + D / 2 to 2i + 1."""
    return x.index_select(dim, torch.arange(x.shape[dim]).view(2, -1).T.flatten())


def to_halves(x: Tensor, dim: int) -> Tensor:
    """Reorder rows from rotary pairs to rotary halves, the inverse of ``to_pairs``."""
    return x.index_select(dim, torch.arange(x.shape[dim]).view(-1, 2).T.flatten())
