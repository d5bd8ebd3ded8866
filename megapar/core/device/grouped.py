"""Grouped GEMM: linear layers of many experts at once, over rows sorted by expert.

``torch.nn.functional.grouped_mm`` is the faster form on a CPU (0.9 to 2.3 times the speed of a loop, measured at 8 to
64 experts, forward and backward). It is also faster on GPUs that have a kernel for it, where the host does not wait for
the device (``Device.grouped_lacks``). Elsewhere the host needs the number of rows of each expert: ``linear_by_size``
then takes every dtype and width, in one batched product if all experts have the same number of rows.

Shape letters: R rows, I input features, O output features, E experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

GROUPED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
ALIGNMENT_BYTES = 16


def row_ends(counts_E: Tensor) -> Tensor:
    """Return the row after the last one of each expert, as ``grouped_mm`` takes it: [E] int32."""
    return counts_E.cumsum(0).to(torch.int32)


def grouped_linear_reference(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, ends: Callable[[], Tensor] | None = None
) -> Tensor:
    """Multiply each row by the transposed weight of its expert, to [R, O], expert by expert. Waits for the counts.

    ends: Returns ``row_ends`` of the counts, which several products share; None: a form that needs it computes it.
    """
    pieces = rows_RI.split(counts_E.tolist())
    # unbind instead of indexing: its backward stacks once, and does not add E tensors of the full size.
    return torch.cat([F.linear(piece, weight) for piece, weight in zip(pieces, weight_EOI.unbind(0), strict=True)])


def grouped_linear_aligned(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, ends: Callable[[], Tensor] | None = None
) -> Tensor:
    """Compute ``grouped_linear_reference`` in one kernel if it accepts these widths."""
    form = grouped_linear_fused if grouped_mm_takes(rows_RI, weight_EOI) else grouped_linear_reference
    return form(rows_RI, weight_EOI, counts_E, ends)


def grouped_linear_fused(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, ends: Callable[[], Tensor] | None = None
) -> Tensor:
    """Compute ``grouped_linear_reference`` in one kernel. The offsets stay on the device."""
    ends_E = row_ends(counts_E) if ends is None else ends()
    product: Tensor = F.grouped_mm(rows_RI.contiguous(), weight_EOI.transpose(1, 2), offs=ends_E)
    if product.requires_grad:
        # The kernel's backward rejects expanded gradients, such as that of a sum. A hook costs less than a function.
        product.register_hook(Tensor.contiguous)
    return product


def linear_by_size(rows_RI: Tensor, weight_EOI: Tensor, sizes_E: Sequence[int]) -> Tensor:
    """Compute ``grouped_linear_reference`` with sizes on the host, without waiting in the forward or backward."""
    return _LinearBySize.apply(rows_RI, weight_EOI, tuple(sizes_E))


def input_gradient_by_size(dy_RO: Tensor, weight_EOI: Tensor, sizes_E: Sequence[int]) -> Tensor:
    """Compute ``grouped_input_gradient_reference`` with sizes on the host."""
    return _multiply_rows(dy_RO, weight_EOI, sizes_E)


def weight_gradient_by_size(dy_RO: Tensor, rows_RI: Tensor, sizes_E: Sequence[int]) -> Tensor:
    """Compute ``grouped_weight_gradient_reference`` with sizes on the host."""
    if _alike(sizes_E):
        dy_ECO, rows_ECI = (x.unflatten(0, (len(sizes_E), sizes_E[0])) for x in (dy_RO, rows_RI))
        return torch.bmm(dy_ECO.transpose(1, 2), rows_ECI)
    products = dy_RO.new_empty(len(sizes_E), dy_RO.shape[1], rows_RI.shape[1])
    pieces = zip(dy_RO.split(list(sizes_E)), rows_RI.split(list(sizes_E)), products, strict=True)
    for dy, rows, product in pieces:
        torch.mm(dy.t(), rows, out=product)  # zeros for an expert without rows
    return products


def grouped_input_gradient_reference(dy_RO: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply each row by the weight of its expert, to [R, I]."""
    return grouped_linear_reference(dy_RO, weight_EOI.transpose(1, 2), counts_E)


def grouped_input_gradient_aligned(dy_RO: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Compute ``grouped_input_gradient_reference`` in one kernel if it accepts these widths."""
    if not grouped_mm_takes(dy_RO, weight_EOI):
        return grouped_input_gradient_reference(dy_RO, weight_EOI, counts_E)
    return F.grouped_mm(dy_RO.contiguous(), weight_EOI, offs=row_ends(counts_E))


def grouped_weight_gradient_reference(dy_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    """Compute dy^T x of the rows of each expert, [E, O, I]."""
    sizes = counts_E.tolist()
    pieces = zip(dy_RO.split(sizes), rows_RI.split(sizes), strict=True)
    return torch.stack([dy_e.t() @ rows_e for dy_e, rows_e in pieces])


def grouped_weight_gradient_aligned(dy_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    """Compute ``grouped_weight_gradient_reference`` in one kernel if it accepts these widths."""
    if dy_RO.dtype not in GROUPED_DTYPES or not (_aligned(dy_RO) and _aligned(rows_RI)):
        return grouped_weight_gradient_reference(dy_RO, rows_RI, counts_E)
    return F.grouped_mm(dy_RO.t(), rows_RI, offs=row_ends(counts_E))


def grouped_mm_takes(rows_RI: Tensor, weight_EOI: Tensor) -> bool:
    """Return True if the kernel accepts dtype, widths and addresses: rows must be multiples of 16 bytes."""
    if rows_RI.dtype != weight_EOI.dtype or rows_RI.dtype not in GROUPED_DTYPES:
        return False
    item_bytes = rows_RI.element_size()
    lengths = (*weight_EOI.shape[1:], weight_EOI.storage_offset(), rows_RI.storage_offset())
    return weight_EOI.is_contiguous() and all(length * item_bytes % ALIGNMENT_BYTES == 0 for length in lengths)


def _aligned(x: Tensor) -> bool:
    return all(length * x.element_size() % ALIGNMENT_BYTES == 0 for length in (x.shape[1], x.storage_offset()))


def _multiply_rows(x_RA: Tensor, weight_EAB: Tensor, sizes_E: Sequence[int]) -> Tensor:
    """Multiply each row by the matrix of its expert, to [R, B]."""
    if _alike(sizes_E):
        return torch.bmm(x_RA.unflatten(0, (len(sizes_E), sizes_E[0])), weight_EAB).flatten(0, 1)
    y_RB = x_RA.new_empty(x_RA.shape[0], weight_EAB.shape[2])
    sizes = list(sizes_E)
    for x, weight, y in zip(x_RA.split(sizes), weight_EAB, y_RB.split(sizes), strict=True):
        if x.shape[0]:
            torch.mm(x, weight, out=y)
    return y_RB


def _alike(sizes_E: Sequence[int]) -> bool:
    return len(set(sizes_E)) == 1


class _LinearBySize(torch.autograd.Function):
    # A custom backward writes products in place, where autograd of the loop would concatenate them afterwards.
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(rows, weight)
        return _multiply_rows(rows, weight.transpose(1, 2), sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows, weight), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = input_gradient_by_size(dy, weight, ctx.sizes) if ctx.needs_input_grad[0] else None
        dw = weight_gradient_by_size(dy, rows, ctx.sizes) if ctx.needs_input_grad[1] else None
        return dx, dw, None
