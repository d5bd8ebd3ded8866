"""Linear layers of many experts at once, over rows that are sorted by expert, and the ways of rows to and from them.

``torch.nn.functional.grouped_mm`` is the faster form of the first on GPUs, and on CPU too (measured at 8 to 64 experts,
forward and backward: 0.9 to 2.3 times the loop's speed, never far behind it), and it does not wait for the device; the
plain loop takes every dtype and every width.

Shape letters: R rows, I input features, O output features, E experts on this rank, T tokens, k choices, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
ALIGNMENT_BYTES = 16


def grouped_linear_reference(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """[R, O]: each row times the transposed weight of its expert, expert by expert; waits for the counts."""
    pieces = rows_RI.split(counts_E.tolist())
    # unbind, not indexing: its backward stacks once instead of adding E tensors of the full size
    return torch.cat([F.linear(piece, weight) for piece, weight in zip(pieces, weight_EOI.unbind(0), strict=True)])


def grouped_linear_aligned(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """``grouped_linear_reference`` in one kernel where that takes these widths."""
    form = grouped_linear_fused if grouped_mm_takes(rows_RI, weight_EOI) else grouped_linear_reference
    return form(rows_RI, weight_EOI, counts_E)


def grouped_linear_fused(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """``grouped_linear_reference`` in one kernel; the offsets stay on the device."""
    ends_E = counts_E.cumsum(0).to(torch.int32)
    product: Tensor = F.grouped_mm(rows_RI.contiguous(), weight_EOI.transpose(1, 2), offs=ends_E)
    return _ContiguousGradient.apply(product)  # type: ignore[no-any-return]


def grouped_input_gradient_reference(dy_RO: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """[R, I]: each row times the weight of its expert."""
    return grouped_linear_reference(dy_RO, weight_EOI.transpose(1, 2), counts_E)


def grouped_input_gradient_aligned(dy_RO: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """``grouped_input_gradient_reference`` in one kernel where that takes these widths."""
    if not grouped_mm_takes(dy_RO, weight_EOI):
        return grouped_input_gradient_reference(dy_RO, weight_EOI, counts_E)
    product: Tensor = F.grouped_mm(dy_RO.contiguous(), weight_EOI, offs=counts_E.cumsum(0).to(torch.int32))
    return product


def grouped_weight_gradient_reference(dy_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    """[E, O, I]: dy^T x of the rows of each expert."""
    sizes = counts_E.tolist()
    pieces = zip(dy_RO.split(sizes), rows_RI.split(sizes), strict=True)
    return torch.stack([dy_e.t() @ rows_e for dy_e, rows_e in pieces])


def grouped_weight_gradient_aligned(dy_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    """``grouped_weight_gradient_reference`` in one kernel where that takes these widths."""
    if dy_RO.dtype not in GROUPED_DTYPES or not (_aligned(dy_RO) and _aligned(rows_RI)):
        return grouped_weight_gradient_reference(dy_RO, rows_RI, counts_E)
    ends_E = counts_E.cumsum(0).to(torch.int32)
    product: Tensor = F.grouped_mm(dy_RO.t(), rows_RI, offs=ends_E)
    return product


def grouped_mm_takes(rows_RI: Tensor, weight_EOI: Tensor) -> bool:
    """Dtype, widths and addresses are such as the kernel wants: rows of a multiple of 16 bytes."""
    if rows_RI.dtype != weight_EOI.dtype or rows_RI.dtype not in GROUPED_DTYPES:
        return False
    item_bytes = rows_RI.element_size()
    lengths = (*weight_EOI.shape[1:], weight_EOI.storage_offset(), rows_RI.storage_offset())
    return weight_EOI.is_contiguous() and all(length * item_bytes % ALIGNMENT_BYTES == 0 for length in lengths)


def permute_reference(x_TH: Tensor, pair_R: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
    """[R, H]: the token of each row's pair. The other arguments say the same from the tokens' side."""
    return x_TH.index_select(0, pair_R // row_Tk.shape[1])


def unpermute_reference(rows_RH: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
    """[T, H]: the sum of the rows of each token's kept pairs, added in fp32 at least.

    A bag is gather and sum in one pass, without the [T, k, H] in between, and unlike index_add deterministic on every
    device.
    """
    weights = None if kept_Tk is None else kept_Tk.to(rows_RH.dtype)
    return F.embedding_bag(row_Tk, rows_RH.contiguous(), mode="sum", per_sample_weights=weights)


def _aligned(x: Tensor) -> bool:
    return all(length * x.element_size() % ALIGNMENT_BYTES == 0 for length in (x.shape[1], x.storage_offset()))


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: the kernel's backward refuses expanded ones (of a plain sum)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()
