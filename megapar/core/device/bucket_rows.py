"""Copies between many tensors and the rows of a sharding bucket, and sums of gradients in its dtype.

rows [n, P]: row r contains piece r of every tensor, one after the other. Tensor i is cut along its dim ``dims[i]``,
which n divides, and each piece is contiguous. The last elements of a row may belong to no tensor.

    tensor a, cut along dim 0      tensor b, cut along dim 1      row 0 | a0 b0 |
    tensor b is as many tensors, cut along dim 0, as its dim 0    row 1 | a1 b1 |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from megapar.core.device import triton_operators

MOST_SLICES = 512  # in a call: the host makes a view of each


def pack_bucket_reference(rows: Tensor, tensors: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Copy tensors into ``rows`` [n, P], and cast them to its dtype."""
    for columns, pieces in _pairs(rows, tensors, dims):
        columns.copy_(pieces)


def unpack_bucket_reference(rows: Tensor, tensors: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Copy ``rows`` [n, P] into tensors of the same dtype."""
    for columns, pieces in _pairs(rows, tensors, dims):
        pieces.copy_(columns)


def _pairs(rows: Tensor, tensors: Sequence[Tensor], dims: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor's columns of the rows and its pieces, both [n, *piece]."""
    start = 0
    for tensor, dim in zip(tensors, dims, strict=True):
        pieces = tensor.unflatten(dim, (rows.shape[0], -1)).movedim(dim, 0)
        end = start + tensor.numel() // rows.shape[0]
        yield rows[:, start:end].unflatten(1, pieces.shape[1:]), pieces
        start = end


def pack_bucket_cuda(rows: Tensor, tensors: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Compute ``pack_bucket_reference`` by one kernel, as FSDP2 does."""
    if not _is_one_call(tensors, dims):
        pack_bucket_reference(rows, tensors, dims)
        return
    slices = _slices(tensors, dims)
    if rest := rows.shape[1] - sum(tensor.numel() for tensor in tensors) // rows.shape[0]:
        slices.append(tensors[0].new_empty(rows.shape[0] * rest))
    torch._chunk_cat(slices, dim=0, num_chunks=rows.shape[0], out=rows)


def unpack_bucket_cuda(rows: Tensor, tensors: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Compute ``unpack_bucket_reference`` by one kernel, as FSDP2 does."""
    if not _is_one_call(tensors, dims):
        unpack_bucket_reference(rows, tensors, dims)
        return
    outputs = [part.view(rows.shape[0], -1) for part in _slices(tensors, dims)]
    sizes = [output.shape[1] for output in outputs]
    if rest := rows.shape[1] - sum(sizes):
        outputs.append(rows.new_empty(rows.shape[0], rest))
        sizes.append(rest)
    torch.split_with_sizes_copy(rows, sizes, dim=1, out=outputs)


def add_gradient_reference(total: Tensor, gradient: Tensor, *, begins: bool) -> Tensor:
    """Add a gradient [n, ..] to a sum of its shape in place, in the sum's dtype; overwrite if it ``begins`` the sum."""
    return total.copy_(gradient) if begins else total.add_(gradient)


def add_gradient_cuda(total: Tensor, gradient: Tensor, *, begins: bool) -> Tensor:
    """Compute ``add_gradient_reference`` in Triton for 16-bit gradients, which torch copies at half the bandwidth."""
    if not triton_operators.adds_gradient(total, gradient):
        return add_gradient_reference(total, gradient, begins=begins)
    torch.ops.megapar.add_gradient(total, gradient, begins)
    return total


def _is_one_call(tensors: Sequence[Tensor], dims: Sequence[int]) -> bool:
    """Return whether all tensors can be copied at once; a single tensor, cut along dim 0, is a plain copy."""
    if len(tensors) == 1 and not dims[0]:
        return False
    num_slices = sum(prod(tensor.shape[:dim]) for tensor, dim in zip(tensors, dims, strict=True))
    return num_slices <= MOST_SLICES and all(tensor.is_contiguous() for tensor in tensors)


def _slices(tensors: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Return the tensors as views that are cut along dim 0."""
    slices: list[Tensor] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        slices.extend(tensor.flatten(0, dim - 1).unbind(0) if dim > 1 else tensor.unbind(0) if dim else (tensor,))
    return slices
