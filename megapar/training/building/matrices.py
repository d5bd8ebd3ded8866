"""The matrices of a model, for Muon: their parameters, how these are cut, and which ranks have them. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from megapar.core.box import Box
from megapar.core.grid import Grid
from megapar.core.optimizer.matrix_plan import Matrix
from megapar.core.sharding.cut import ParameterInfo, master_box
from megapar.model.parameter import HfPiece, ParameterSpec

_APART = ("embedding", "head")  # units whose weights are looked up or make logits, except in an MTP block
_HEADS = re.compile(r"\b(q|k|v|q_b|kv_b|query|key|value)(_proj)?\.weight$")  # projections that make heads


def marked(table: Sequence[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Return the table with a mark at the parameters that consist of matrices.

    Embeddings, heads, routers, gates of one feature, norms and biases do not.
    """
    return tuple(replace(spec, matrix=_is_matrix(spec)) for spec in table)


def _is_matrix(spec: ParameterSpec) -> bool:
    if not spec.trainable or spec.init != "normal" or spec.router:
        return False
    if spec.unit in _APART and not spec.name.startswith("mtp."):
        return False
    return all(len(piece.hf_shape) == 2 and min(piece.hf_shape) > 1 for piece in spec.pieces)


def matrices_of(spec: ParameterSpec, qkv_split: str) -> list[Matrix]:
    """Return the matrices of a parameter: the tensors of its Hugging Face form.

    Projections that make heads are cut by ``qkv_split``: each ``tensor`` whole, all of a parameter ``fused``, by
    ``group`` of queries, or by ``head``.
    """
    if qkv_split == "fused" and len(spec.pieces) > 1 and _makes_heads(spec.pieces[0]):
        rows = sum(piece.hf_shape[0] for piece in spec.pieces)
        return [Matrix(spec, Box.whole(spec.shape), rows, spec.pieces[0].hf_shape[1])]
    matrices = []
    for piece in spec.pieces:
        box, columns = Box.at(spec.shape, piece.index), piece.hf_shape[1]
        dims = _cut_dims(box, qkv_split) if _makes_heads(piece) else 0
        for indices in product(*(range(size) for size in box.sizes[:dims])):
            part = box
            for dim, index in enumerate(indices):
                part = part.cut(dim, box.sizes[dim], index)
            matrices.append(Matrix(spec, part, part.numel // columns, columns))
    return matrices


def _makes_heads(piece: HfPiece) -> bool:
    return _HEADS.search(piece.hf_name) is not None


def _cut_dims(box: Box, qkv_split: str) -> int:
    """Return the number of leading dims of [G, heads of a group, D, H], or of [N, D, H], that divide matrices."""
    if qkv_split == "head":
        return len(box.sizes) - 2
    return 1 if qkv_split == "group" and len(box.sizes) > 3 else 0


def boxes_of(grid: Grid, ranks: Sequence[int], *, full: bool) -> Callable[[ParameterInfo], Sequence[Box]]:
    """Return a function that gives each rank's piece of a parameter's master weights. full: stage 3."""
    known: dict[object, list[Box]] = {}

    def boxes(spec: ParameterInfo) -> Sequence[Box]:
        key = spec.shape, spec.axes, spec.expert
        if key not in known:
            known[key] = [master_box(spec, grid, rank, full=full) for rank in ranks]
        return known[key]

    return boxes
