"""Operators of the Triton kernels that order, copy and sum experts' rows, registered with torch.

Used like those of ``triton_operators.py``. All of them repeat: no result depends on the order of threads.

Shape letters: T tokens, k choices per token, H hidden, E experts, R rows, w columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megapar.core.device import triton_operators

MOST_EXPERTS = 1024  # bins of a program of the sort
MOST_RUNS = 4096  # counts that every program reads
MOST_CHOICES = 32  # loads of a program of the sum

_LIBRARY = torch.library.Library("megapar", "FRAGMENT")
_MADE = "(Tensor pair, Tensor row, Tensor kept, Tensor counts, Tensor ends)"
_LIBRARY.define(
    f"sort_pairs(Tensor experts, Tensor? kept, int num_experts, int rows, int? capacity, bool fill) -> {_MADE}"
)
_LIBRARY.define(f"order_runs(Tensor like, int[] shape, int room, int rows, int length) -> {_MADE}")
_LIBRARY.define("copy_rows(Tensor rows, Tensor index, Tensor? kept, int choices) -> Tensor")
_LIBRARY.define(
    "pack_rows(Tensor rows, Tensor weights, int columns, Tensor? index, Tensor? kept, int choices, bool by_index)"
    " -> Tensor"
)
_LIBRARY.define(
    "unpack_rows(Tensor message, int hidden, int w, Tensor? index, int room, bool by_index) -> (Tensor, Tensor)"
)
_LIBRARY.define("sum_rows(Tensor rows, int hidden, Tensor row, Tensor? kept) -> Tensor")
_LIBRARY.define("sum_message(Tensor message, int hidden, int w, Tensor row, Tensor? kept) -> (Tensor, Tensor)")

Made = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # pairs, rows, which are kept, counts, ends; as ``RowOrder``


def takes_rows(rows: Tensor, choices: int = 1) -> bool:
    """Return True if the kernels copy and sum these rows, ``choices`` for each token."""
    whole = rows.dim() == 2 and rows.stride(1) == 1 and rows.dtype.itemsize in (2, 4)
    return triton_operators.usable(rows.device) and whole and choices <= MOST_CHOICES


def takes_experts(experts: Tensor, num_experts: int) -> bool:
    """Return True if the kernels sort pairs of so many experts."""
    return triton_operators.usable(experts.device) and num_experts <= MOST_EXPERTS


def takes_runs(like: Tensor, runs: int) -> bool:
    """Return True if the kernel orders so many runs of rows."""
    return triton_operators.usable(like.device) and 0 < runs <= MOST_RUNS


def sort_pairs(
    experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, rows: int, capacity: int | None, *, fill: bool
) -> Made:
    """Sort pairs by expert, as ``row_order.sort_pairs_reference``; as ``spread_pairs_reference`` with a capacity."""
    made: Made = torch.ops.megapar.sort_pairs(experts_Tk.contiguous(), kept_Tk, num_experts, rows, capacity, fill)
    return made


def order_runs(like: Tensor, shape: Sequence[int], room: int, rows: int, length: int) -> Made:
    """Order runs of rows by expert, as ``row_order.order_runs_reference``.

    Args:
        like: [N, S, L] lengths of the runs; only a tensor of the device if ``length`` is not 0.
        shape: (N, S, L).
        room: Places of each block.
        rows: Sum of the lengths.
        length: Length of every run; 0: they are in ``like``.
    """
    made: Made = torch.ops.megapar.order_runs(like.contiguous(), list(shape), room, rows, length)
    return made


def copy_rows(rows: Tensor, index_R: Tensor, kept_R: Tensor | None, choices: int) -> Tensor:
    """Copy row ``index // choices``, or zeros where not kept: [R, H]."""
    copied: Tensor = torch.ops.megapar.copy_rows(rows, index_R, kept_R, choices)
    return copied


def pack_rows(
    rows: Tensor,
    weights: Tensor,
    columns: int,
    index_R: Tensor | None,
    kept_R: Tensor | None,
    choices: int,
    *,
    sort_weights: bool,
) -> Tensor:
    """Build a message, as ``expert_rows.pack_reference``. weights: [.., w], as columns of the rows' dtype."""
    by_index = sort_weights and index_R is not None
    message: Tensor = torch.ops.megapar.pack_rows(rows, weights, columns, index_R, kept_R, choices, by_index)
    return message


def unpack_rows(
    message: Tensor, hidden: int, dtype: torch.dtype, index_R: Tensor | None, room: int, *, sort_weights: bool
) -> tuple[Tensor, Tensor]:
    """Split a message, as ``expert_rows.unpack_reference``."""
    by_index = sort_weights and index_R is not None
    w = dtype.itemsize // message.dtype.itemsize
    tokens, bits = torch.ops.megapar.unpack_rows(message, hidden, w, index_R, room, by_index)
    return tokens, bits.view(dtype).flatten()


def sum_rows(rows: Tensor, hidden: int, row_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
    """Sum the rows of each token, [T, H], in fp32."""
    if row_Tk.shape[1] == 1:
        kept = None if kept_Tk is None else kept_Tk.flatten()
        return copy_rows(rows[:, :hidden], row_Tk.flatten(), kept, 1)
    summed: Tensor = torch.ops.megapar.sum_rows(rows, hidden, row_Tk.contiguous(), kept_Tk)
    return summed


def sum_message(
    message: Tensor, hidden: int, dtype: torch.dtype, row_Tk: Tensor, kept_Tk: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum a message's rows and read its weights, as ``expert_rows.sum_message_reference``."""
    w = dtype.itemsize // message.dtype.itemsize
    y_TH, bits = torch.ops.megapar.sum_message(message, hidden, w, row_Tk.contiguous(), kept_Tk)
    return y_TH, bits.view(dtype).view(row_Tk.shape)


def _sort_pairs(
    experts: Tensor, kept: Tensor | None, num_experts: int, rows: int, capacity: int | None, fill: bool
) -> Made:
    from megapar.core.device.triton_kernels import expert_rows

    return expert_rows.sort_pairs(experts, kept, num_experts, rows, capacity, fill)[:]  # a plain tuple, for torch


def _order_runs(like: Tensor, shape: Sequence[int], room: int, rows: int, length: int) -> Made:
    from megapar.core.device.triton_kernels import expert_rows

    blocks, sources, experts = shape
    counts = None if length else like
    return expert_rows.order_runs(like, counts, (blocks, sources, experts), room, rows, length)[:]


def _copy_rows(rows: Tensor, index: Tensor, kept: Tensor | None, choices: int) -> Tensor:
    from megapar.core.device.triton_kernels import expert_rows

    out = _fake_copy_rows(rows, index, kept, choices)
    expert_rows.copy_rows(rows, out, rows.shape[1], index=index, kept=kept, choices=choices)
    return out


def _pack_rows(
    rows: Tensor,
    weights: Tensor,
    columns: int,
    index: Tensor | None,
    kept: Tensor | None,
    choices: int,
    by_index: bool,
) -> Tensor:
    from megapar.core.device.triton_kernels import expert_rows

    hidden = rows.shape[1]
    out = _fake_pack_rows(rows, weights, columns, index, kept, choices, by_index)
    into = out[:, hidden : hidden + weights.shape[1]]
    expert_rows.copy_rows(
        rows,
        out,
        hidden,
        index=index,
        kept=kept,
        choices=choices,
        weights=weights,
        out_weights=into,
        by_index=by_index,
    )
    return out


def _unpack_rows(
    message: Tensor, hidden: int, w: int, index: Tensor | None, room: int, by_index: bool
) -> tuple[Tensor, Tensor]:
    from megapar.core.device.triton_kernels import expert_rows

    tokens, bits = _fake_unpack_rows(message, hidden, w, index, room, by_index)
    given = message.shape[0] if index is None else None
    weights = message[:, hidden : hidden + w]
    expert_rows.copy_rows(
        message, tokens, hidden, index=index, given=given, weights=weights, out_weights=bits, by_index=by_index
    )
    return tokens, bits


def _sum_rows(rows: Tensor, hidden: int, row: Tensor, kept: Tensor | None) -> Tensor:
    from megapar.core.device.triton_kernels import expert_rows

    return expert_rows.sum_rows(rows, row, kept, hidden)


def _sum_message(message: Tensor, hidden: int, w: int, row: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    from megapar.core.device.triton_kernels import expert_rows

    bits = message.new_empty(row.numel(), w)
    weights = message[:, hidden : hidden + w]
    return expert_rows.sum_rows(message, row, kept, hidden, weights, bits), bits


def _fake_sort_pairs(
    experts: Tensor, kept: Tensor | None, num_experts: int, rows: int, capacity: int | None, fill: bool
) -> Made:
    marked = rows if fill or capacity is not None else 0
    return (
        experts.new_empty(rows),
        torch.empty_like(experts),
        experts.new_empty(marked, dtype=torch.bool),
        experts.new_empty(num_experts),
        experts.new_empty(num_experts, dtype=torch.int32),
    )


def _fake_order_runs(like: Tensor, shape: Sequence[int], room: int, rows: int, length: int) -> Made:
    places = room * shape[0]
    return (
        like.new_empty(rows, dtype=torch.int64),
        like.new_empty(places, 1, dtype=torch.int64),
        like.new_empty(0 if rows == places else places, dtype=torch.bool),
        like.new_empty(shape[2], dtype=torch.int64),
        like.new_empty(shape[2], dtype=torch.int32),
    )


def _fake_copy_rows(rows: Tensor, index: Tensor, kept: Tensor | None, choices: int) -> Tensor:
    return rows.new_empty(index.shape[0], rows.shape[1])


def _fake_pack_rows(
    rows: Tensor,
    weights: Tensor,
    columns: int,
    index: Tensor | None,
    kept: Tensor | None,
    choices: int,
    by_index: bool,
) -> Tensor:
    return rows.new_empty((rows if index is None else index).shape[0], columns)


def _fake_unpack_rows(
    message: Tensor, hidden: int, w: int, index: Tensor | None, room: int, by_index: bool
) -> tuple[Tensor, Tensor]:
    count = room if index is None else index.shape[0]
    return message.new_empty(count, hidden), message.new_empty(count if by_index else message.shape[0], w)


def _fake_sum_rows(rows: Tensor, hidden: int, row: Tensor, kept: Tensor | None) -> Tensor:
    return rows.new_empty(row.shape[0], hidden)


def _fake_sum_message(message: Tensor, hidden: int, w: int, row: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    return message.new_empty(row.shape[0], hidden), message.new_empty(row.numel(), w)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sort_pairs": (_sort_pairs, _fake_sort_pairs),
    "order_runs": (_order_runs, _fake_order_runs),
    "copy_rows": (_copy_rows, _fake_copy_rows),
    "pack_rows": (_pack_rows, _fake_pack_rows),
    "unpack_rows": (_unpack_rows, _fake_unpack_rows),
    "sum_rows": (_sum_rows, _fake_sum_rows),
    "sum_message": (_sum_message, _fake_sum_message),
}
for _name, (_kernel, _fake) in KERNELS.items():
    _LIBRARY.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"megapar::{_name}", _fake, lib=_LIBRARY)
