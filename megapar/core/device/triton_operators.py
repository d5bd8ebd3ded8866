"""Operators that Triton kernels compute, registered with torch, so that a trace and a compiler see one operator each.

torch's builds for CUDA include Triton. GPUs use the kernels after each has computed an example (``triton_trial.py``);
otherwise they use the forms without Triton. No result depends on the order of threads, so all of them repeat.

An operator consists of a function for its callers, without autograd, and one that allocates its results (``_new_..``),
which is all that a trace runs. The function of its name in ``triton_kernels`` fills them.

Shape letters: B batch, S sequence, G key-value heads, Q query heads of a group, D head size, N rows of logits and V
vocabulary, F features, T tokens, k choices per token, H hidden, E experts, R rows, w columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megapar.core.device.attention.table import LARGEST_GROUP

MOST_EXPERTS = 1024  # bins of a program of the sort
MOST_RUNS = 4096  # counts that every program reads
MOST_CHOICES = 32  # loads of a program of the sum
MOST_NORMED = 8192  # features of a row that a program normalizes
FP8_ROWS = 16  # rows of a product in fp8 are filled up to a multiple of this
MOST_SCORED = 64  # groups of experts x best experts of each
ROUTER_ELEMENTS = 512  # tokens x experts of a program, four of a thread

_USED: set[torch.device] = set()  # decided once per process
_LIBRARY = torch.library.Library("megapar", "DEF")
KERNELS: dict[str, Callable[..., Any]] = {}
"""Operator -> the function that allocates its results and launches its kernel."""

Order = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # as ``expert_rows.RowOrder``


def use(device: torch.device) -> None:
    """Let the GPU ``device`` use the kernels from now on. All ranks decide alike: results differ by rounding."""
    _USED.add(device)


def usable(device: torch.device) -> bool:
    """Return True if ``device`` uses the kernels (``use``)."""
    return device in _USED


def takes_heads(qkv: Tensor) -> bool:
    """Return True if the kernels take qkv [.., Q + 2, D], whose heads of a group must fit one block."""
    return usable(qkv.device) and qkv.shape[-2] * qkv.shape[-1] <= LARGEST_GROUP


def takes_rows(rows: Tensor, choices: int = 1) -> bool:
    """Return True if the kernels copy and sum these rows, ``choices`` for each token."""
    whole = rows.dim() == 2 and rows.stride(1) == 1 and rows.dtype.itemsize in (2, 4)
    return usable(rows.device) and whole and choices <= MOST_CHOICES


def takes_experts(experts: Tensor, num_experts: int) -> bool:
    """Return True if the kernels sort pairs of this many experts."""
    return usable(experts.device) and num_experts <= MOST_EXPERTS


def takes_runs(like: Tensor, runs: int) -> bool:
    """Return True if the kernel orders this many runs of rows."""
    return usable(like.device) and 0 < runs <= MOST_RUNS


def takes_router(x: Tensor, weight: Tensor, topk: int, scored: int) -> bool:
    """Return True if the kernels route tokens x by this weight [E, H], with ``scored`` experts of all groups."""
    few = weight.shape[0] <= MOST_EXPERTS and topk <= MOST_CHOICES and scored <= MOST_SCORED
    return usable(x.device) and few and (x.dtype, weight.dtype) == (torch.bfloat16, torch.float32)


def router_tile(experts: int) -> tuple[int, int]:
    """Return (tokens, columns) of a program of the router, powers of two."""
    columns = 1 << max(4, (experts - 1).bit_length())
    return max(1, ROUTER_ELEMENTS // columns), columns


def adds_gradient(total: Tensor, gradient: Tensor) -> bool:
    """Return True if the kernel adds this gradient [n, ..] to this sum of its shape."""
    if not usable(total.device) or total.dtype != torch.float32 or gradient.dtype.itemsize != 2:
        return False
    return gradient.numel() > 0 and total[0].is_contiguous() and gradient[0].is_contiguous()


def rotary_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [B, S, G, Q + 2, D] into q [B, S, G Q, D], k and v [B, S, G, D], and rotate q and k.

    cos and sin are [B, S, D / 2] in fp32.
    """
    q, k, v = torch.ops.megapar.rotary_heads(qkv.contiguous(), *_by_sample(cos, sin))
    return q, k, v


def rotary_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of qkv for the gradients of ``rotary_heads``."""
    heads = (x.contiguous() for x in (dq, dk, dv))
    return torch.ops.megapar.rotary_heads_backward(*heads, *_by_sample(cos, sin))


def cross_entropy(logits: Tensor, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [N] of labels [N] for logits [N, V] and the losses' gradient [N, V] in ``dtype``."""
    lse, log_p = torch.ops.megapar.log_probabilities(logits, labels)
    return log_p, torch.ops.megapar.gradient_of_logits(logits, labels, lse, dtype)


def swiglu(gate_up: Tensor, weights: Tensor | None, *, clamped: bool = False) -> Tensor:
    """Return silu(gate) * up of gate_up [.., 2, F], or clamped swiglu, times weights [.., 1] if given: [.., F]."""
    flat = None if weights is None else weights.flatten()
    y: Tensor = torch.ops.megapar.swiglu(_rows(gate_up, 2), flat, clamped)
    return y.view(*gate_up.shape[:-2], -1)


def swiglu_backward(
    gradient: Tensor, gate_up: Tensor, weights: Tensor | None, *, clamped: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of gate_up and of the weights for the gradient of ``swiglu``."""
    flat = None if weights is None else weights.flatten()
    d_rows, d_weights = torch.ops.megapar.swiglu_backward(_rows(gradient, 1), _rows(gate_up, 2), flat, clamped)
    return d_rows.view(gate_up.shape), None if weights is None else d_weights.view(weights.shape)


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x [R, K] to e4m3 [R', K], with rows of zeros up to a multiple of 16, and scales [K / 128, R']."""
    values, scale = torch.ops.megapar.cast_rows(x)
    return values, scale


def swiglu_cast(gate_up: Tensor, clamped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``swiglu`` without weights, and its cast, as ``fp8.swiglu_cast_reference``."""
    y, values, scale = torch.ops.megapar.swiglu_cast(_rows(gate_up, 2), clamped)
    return y.view(*gate_up.shape[:-2], -1), values, scale.t()


def swiglu_cast_backward(gradient: Tensor, gate_up: Tensor, clamped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of gate_up for that of ``swiglu_cast``, and its cast."""
    d_rows, values, scale = torch.ops.megapar.swiglu_cast_backward(_rows(gradient, 1), _rows(gate_up, 2), clamped)
    return d_rows.view(gate_up.shape), values, scale.t()


def norm_cast(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the RMS norm of x [.., H], 1 / root of the mean of squares [.., 1], and the norm's cast."""
    y, root, values, scale = torch.ops.megapar.norm_cast(_rows(x, 1), weight, epsilon)
    return y.view(x.shape), root.view(*x.shape[:-1], 1), values, scale.t()


def cast_whole_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x [R, K] to e4m3 [R, K] with a scale per row, [R]."""
    values, scale = torch.ops.megapar.cast_whole_rows(x)
    return values, scale


def cast_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x to e4m3 with one scale, [1]."""
    values, numbers = torch.ops.megapar.cast_tensor(x)
    return values, numbers[:1]


def cast_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a weight [O, I] to e4m3 with scales [O / 128, I / 128], then transposed, both filled as ``ScaledWeight``."""
    values, scale, turned, turned_scale = torch.ops.megapar.cast_weight(weight)
    return values, scale, turned, turned_scale


def sort_pairs(
    experts_Tk: Tensor, kept_Tk: Tensor | None, num_experts: int, rows: int, capacity: int | None, *, fill: bool
) -> Order:
    """Sort pairs by expert, as ``expert_rows.sort_pairs_reference``; with a capacity as ``spread_pairs_reference``."""
    return torch.ops.megapar.sort_pairs(experts_Tk.contiguous(), kept_Tk, num_experts, rows, capacity, fill)


def order_runs(like: Tensor, shape: Sequence[int], room: int, rows: int, length: int) -> Order:
    """Order runs of rows by expert, as ``expert_rows.order_runs_reference``.

    Args:
        like: [N, S, L] lengths of the runs; only a tensor of the device if ``length`` is not 0.
        shape: (N, S, L).
        length: Length of every run; 0: they are in ``like``.
    """
    return torch.ops.megapar.order_runs(like.contiguous(), list(shape), room, rows, length)


def copy_rows(rows: Tensor, index_R: Tensor, kept_R: Tensor | None, choices: int) -> Tensor:
    """Copy row ``index // choices``, or zeros where not kept: [R, H]."""
    return torch.ops.megapar.copy_rows(rows, index_R, kept_R, choices)


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
    return torch.ops.megapar.pack_rows(rows, weights, columns, index_R, kept_R, choices, by_index)


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
    return torch.ops.megapar.sum_rows(rows, hidden, row_Tk.contiguous(), kept_Tk)


def sum_message(
    message: Tensor, hidden: int, dtype: torch.dtype, row_Tk: Tensor, kept_Tk: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum a message's rows and read its weights, as ``expert_rows.sum_message_reference``."""
    w = dtype.itemsize // message.dtype.itemsize
    y_TH, bits = torch.ops.megapar.sum_message(message, hidden, w, row_Tk.contiguous(), kept_Tk)
    return y_TH, bits.view(dtype).view(row_Tk.shape)


def update_adamw(
    tensors: Sequence[Tensor | None],
    given: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    table: tuple[Tensor, Tensor],
) -> None:
    """Change master, moments and weights of a shard in place, as ``adamw.adamw_reference``.

    Args:
        tensors: ``adamw.Tensors``.
        given: ``AdamWStep.update``, ``numbers``, ``found_inf`` and ``grad_scale``.
        table: The shard's ``PieceTable``.
    """
    integers = (x.view(torch.int16) if x is not None and x.dtype == torch.bfloat16 else x for x in tensors)
    torch.ops.megapar.update_adamw(*integers, *given, *table)


def _rows(x: Tensor, dims: int) -> Tensor:
    """Return x as contiguous rows, [R, ..], of its last ``dims`` dims."""
    return x.contiguous().view(x.shape[:-dims].numel(), x.shape[-dims:].numel())


def _by_sample(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return angles whose positions are contiguous. Samples at the same positions may share them in memory."""
    if cos.stride() == sin.stride() and cos.stride()[1:] == (cos.shape[2], 1):
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _new_heads(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, S, G, together, D = qkv.shape
    return qkv.new_empty(B, S, G * (together - 2), D), qkv.new_empty(B, S, G, D), qkv.new_empty(B, S, G, D)


def _new_fused_heads(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, S, G, D = dk.shape
    return dq.new_empty(B, S, G, dq.shape[2] // G + 2, D)


def _new_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:1]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


def _new_gradient(logits: Tensor, labels: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.new_empty(logits.shape, dtype=dtype)


def _new_activations(rows: Tensor, weights: Tensor | None, clamped: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1] // 2)


def _new_swiglu_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor | None, clamped: bool
) -> tuple[Tensor, Tensor]:
    d_weights = rows.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    return rows.new_empty(rows.shape), d_weights


def _new_gelu_gradient(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[-1])


def _new_norm_gradients(gradient: Tensor, x: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0 if more[3] is None else x.shape), x.new_empty(3, x.shape[-1])


def _new_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = -(-x.shape[0] // FP8_ROWS) * FP8_ROWS
    values = x.new_empty(rows, x.shape[1], dtype=torch.float8_e4m3fn)
    return values, x.new_empty(x.shape[1] // 128, rows, dtype=torch.float32)


def _new_cast_activations(rows: Tensor, clamped: bool) -> tuple[Tensor, Tensor, Tensor]:
    y = _new_activations(rows, None, clamped)
    return y, *_new_rows(y)


def _new_cast_gradient(gradient: Tensor, rows: Tensor, clamped: bool) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(rows.shape), *_new_rows(rows)


def _new_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32), *_new_rows(x)


def _new_whole_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], dtype=torch.float32)


def _new_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_zeros(2, dtype=torch.float32)


def _new_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def made(*shape: int) -> tuple[Tensor, Tensor]:
        scales = shape[0] // 128, -(-shape[1] // 512) * 4
        new = weight.new_zeros if shape[1] % 512 else weight.new_empty  # what no kernel fills is zero
        return weight.new_empty(shape, dtype=torch.float8_e4m3fn), new(scales, dtype=torch.float32)

    return *made(*weight.shape), *made(*weight.shape[::-1])


def _new_order(
    experts: Tensor, kept: Tensor | None, num_experts: int, rows: int, capacity: int | None, fill: bool
) -> Order:
    marked = rows if fill or capacity is not None else 0
    return (
        experts.new_empty(rows),
        torch.empty_like(experts),
        experts.new_empty(marked, dtype=torch.bool),
        experts.new_empty(num_experts),
        experts.new_empty(num_experts, dtype=torch.int32),
    )


def _new_order_of_runs(like: Tensor, shape: Sequence[int], room: int, rows: int, length: int) -> Order:
    places = room * shape[0]
    return (
        like.new_empty(rows, dtype=torch.int64),
        like.new_empty(places, 1, dtype=torch.int64),
        like.new_empty(0 if rows == places else places, dtype=torch.bool),
        like.new_empty(shape[2], dtype=torch.int64),
        like.new_empty(shape[2], dtype=torch.int32),
    )


def _new_copies(rows: Tensor, index: Tensor, kept: Tensor | None, choices: int) -> Tensor:
    return rows.new_empty(index.shape[0], rows.shape[1])


def _new_message(rows: Tensor, weights: Tensor, columns: int, index: Tensor | None, *_: Any) -> Tensor:
    return rows.new_empty((rows if index is None else index).shape[0], columns)


def _new_parts(
    message: Tensor, hidden: int, w: int, index: Tensor | None, room: int, by_index: bool
) -> tuple[Tensor, Tensor]:
    count = room if index is None else index.shape[0]
    return message.new_empty(count, hidden), message.new_empty(count if by_index else message.shape[0], w)


def _new_sums(rows: Tensor, hidden: int, row: Tensor, kept: Tensor | None) -> Tensor:
    return rows.new_empty(row.shape[0], hidden)


def _new_sums_and_weights(
    message: Tensor, hidden: int, w: int, row: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    return message.new_empty(row.shape[0], hidden), message.new_empty(row.numel(), w)


def _new_matrix_parts(matrix: Tensor) -> Tensor:
    return matrix.new_empty(4, *matrix.shape, dtype=torch.bfloat16)


def _new_routes(parts: Tensor, bias: Any, valid: Any, given: Any, rule: Sequence[int], scale: float) -> tuple[Any, ...]:
    T, _, E = parts.shape
    tokens, columns = router_tile(E)
    shapes = (T, E), (T, E), (T,), (T, rule[0]), (T, rule[0]), (-(-T // tokens), 4, columns)
    return tuple(
        parts.new_empty(shape, dtype=torch.int64 if number == 3 else None) for number, shape in enumerate(shapes)
    )


def _new_logit_parts(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], 4, logits.shape[1], dtype=torch.bfloat16)


def _in_place(*_: Any) -> None:
    """Allocate nothing, for an operator that changes its arguments."""


def _register(module: str, signature: str, results: Callable[..., Any]) -> None:
    """Register an operator whose kernel fills what ``results`` allocates; None: it only changes an argument."""
    name = signature.partition("(")[0]

    def compute(*arguments: Any) -> Any:
        made = results(*arguments)
        filled = () if made is None else (made,)
        getattr(import_module(f"megapar.core.device.triton_kernels.{module}"), name)(*arguments, *filled)
        return made

    _LIBRARY.define(signature)
    _LIBRARY.impl(name, compute, "CUDA")
    torch.library.register_fake(f"megapar::{name}", results, lib=_LIBRARY)
    KERNELS[name] = compute


_THREE = "(Tensor, Tensor, Tensor)"
_ORDER = "(Tensor pair, Tensor row, Tensor kept, Tensor counts, Tensor ends)"
_register("rotary_heads", f"rotary_heads(Tensor qkv, Tensor cos, Tensor sin) -> {_THREE}", _new_heads)
_register(
    "rotary_heads",
    "rotary_heads_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
    _new_fused_heads,
)
_register("cross_entropy", "log_probabilities(Tensor logits, Tensor labels) -> (Tensor, Tensor)", _new_statistics)
_register(
    "cross_entropy",
    "gradient_of_logits(Tensor logits, Tensor labels, Tensor lse, ScalarType dtype) -> Tensor",
    _new_gradient,
)
_register("swiglu", "swiglu(Tensor rows, Tensor? weights, bool clamped) -> Tensor", _new_activations)
_register(
    "swiglu",
    "swiglu_backward(Tensor gradient, Tensor rows, Tensor? weights, bool clamped) -> (Tensor, Tensor)",
    _new_swiglu_gradients,
)
_register("gradients", "gelu_backward(Tensor gradient, Tensor x) -> (Tensor, Tensor)", _new_gelu_gradient)
_register(
    "gradients",
    "norm_backward(Tensor gradient, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor? kept, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _new_norm_gradients,
)
_register("swiglu", f"swiglu_cast(Tensor rows, bool clamped) -> {_THREE}", _new_cast_activations)
_register("swiglu", f"swiglu_cast_backward(Tensor dy, Tensor rows, bool clamped) -> {_THREE}", _new_cast_gradient)
_register("block_casts", "norm_cast(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor, Tensor)", _new_norm)
_register("block_casts", "cast_rows(Tensor x) -> (Tensor, Tensor)", _new_rows)
_register("block_casts", "cast_whole_rows(Tensor x) -> (Tensor, Tensor)", _new_whole_rows)
_register("block_casts", "cast_tensor(Tensor x) -> (Tensor, Tensor)", _new_tensor)
_register("block_casts", "cast_weight(Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)", _new_weight)
_register(
    "expert_rows",
    f"sort_pairs(Tensor experts, Tensor? kept, int num_experts, int rows, int? capacity, bool fill) -> {_ORDER}",
    _new_order,
)
_register(
    "expert_rows",
    f"order_runs(Tensor like, int[] shape, int room, int rows, int length) -> {_ORDER}",
    _new_order_of_runs,
)
_register("expert_rows", "copy_rows(Tensor rows, Tensor index, Tensor? kept, int choices) -> Tensor", _new_copies)
_register(
    "expert_rows",
    "pack_rows(Tensor rows, Tensor weights, int columns, Tensor? index, Tensor? kept, int choices, bool by_index)"
    " -> Tensor",
    _new_message,
)
_register(
    "expert_rows",
    "unpack_rows(Tensor message, int hidden, int w, Tensor? index, int room, bool by_index) -> (Tensor, Tensor)",
    _new_parts,
)
_register("expert_rows", "sum_rows(Tensor rows, int hidden, Tensor row, Tensor? kept) -> Tensor", _new_sums)
_register(
    "expert_rows",
    "sum_message(Tensor message, int hidden, int w, Tensor row, Tensor? kept) -> (Tensor, Tensor)",
    _new_sums_and_weights,
)
_register("router", "split_matrix(Tensor matrix) -> Tensor", _new_matrix_parts)
_register(
    "router",
    "route(Tensor parts, Tensor? bias, Tensor? valid, Tensor? given, int[] rule, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _new_routes,
)
_register(
    "router",
    "route_backward(Tensor logits, Tensor lse, Tensor experts, Tensor weights, Tensor? valid, Tensor? d_scores,"
    " Tensor? d_weights, Tensor? d_total, Tensor? d_squares, int[] rule, float scale) -> Tensor",
    _new_logit_parts,
)
_register("gradients", "add_gradient(Tensor(a!) total, Tensor gradient, bool begins) -> ()", _in_place)
_register(
    "adamw",
    "update_adamw(Tensor(a!) master, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? weights, "
    "Tensor update, Tensor numbers, Tensor? found_inf, Tensor? grad_scale, Tensor pieces, Tensor owners) -> ()",
    _in_place,
)
