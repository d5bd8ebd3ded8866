"""Attention of whole samples: the plain reference, torch's choice of a fused kernel, and kernels chosen by name.

The table says which form a mask is and which kernel takes which call. Heads of keys and values with different sizes are
padded for kernels that take a single size: zeros after the shorter features change neither the scores nor the other
features of the output.

Shape letters: B batch, S queries, L keys (S except in a slice or with a memory), N query heads, G key-value heads, D
head size of queries and keys, V of values and outputs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapar.core.device.attention import table
from megapar.core.device.attention.mask import causal_keys
from megapar.core.device.attention.row_statistic import RowEnd, Rows
from megapar.core.device.dtypes import wide_product, wide_product_reference

MULTIPLE = 8  # features of a head that FlashAttention takes
_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
WITHOUT_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class EqualHeads(NamedTuple):
    """Queries, keys and values [B, heads, positions, D] of one head size, and the scale of the scores.

    The scale follows from the head size before padding; None for the kernel's default, D^-0.5.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None


class HeadWidths(NamedTuple):
    """Features of key and value heads that the kernel of attention gets: the model's, or more, filled up with zeros."""

    key: int
    value: int


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, valid: Tensor | None = None, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute grouped-query attention softmax(q k^T / sqrt(D)) v by plain products. Materializes all scores.

    Each key-value head serves N / G consecutive query heads: q [B, N, S, D], k [B, G, L, D], v [B, G, L, V] make
    [B, N, S, V].

    Args:
        form: Form of the mask in the table, without documents.
        valid: The keys of form ``MASKED``, as in ``DeviceMask``.
        dropout: Dropout probability of the attention weights.
        rows: Counts the rows of the scores, or gives them a sink.
    """
    visible = None
    if form in (table.CAUSAL, table.LOWER_RIGHT):
        before = k.shape[2] - q.shape[2] if form == table.LOWER_RIGHT else 0
        visible = causal_keys(q.shape[2], k.shape[2], q.device, before)
    elif form == table.MASKED:
        visible = keys_of_heads(valid)
    return plain_attention(q, k, v, visible, dropout, rows)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout: float, rows: Rows = None
) -> Tensor:
    """Compute ``attention_reference`` over the visible keys, bool broadcast to [B, N, S, L]; None for all keys."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = _Scores.apply(q, k) * q.shape[-1] ** -0.5
    if visible is not None:  # not -inf: a sample that is all padding must stay finite
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1) if rows is None else rows.softmax(scores)
    return F.dropout(weights.to(q.dtype), dropout, training=dropout > 0.0) @ v


def products_of(a: Tensor, b: Tensor) -> Tensor:
    """Return a [B, N, S, D] b^T, b [B, N, L, D], in max(fp32, dtype): bf16 has no numbers between 200 and 201."""
    return (wide_product if a.is_cuda else wide_product_reference)(a, b.mT)


class _Scores(torch.autograd.Function):
    """``products_of`` queries and keys, whose gradients are products in their dtype."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return products_of(q, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        grad = grads[0].to(q.dtype)
        return grad @ k, grad.mT @ q


def attention_fused(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, valid: Tensor | None = None, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``attention_reference`` by torch's fused kernels, without materializing the scores."""
    if rows is not None:
        return _attend_with_lse(q, k, v, form=form, valid=valid, dropout=dropout, rows=rows)
    mask, size = keys_of_heads(valid) if form == table.MASKED else None, v.shape[-1]
    q, k, v, scale = equal_head_dims(q, k, v)
    return cut_features(torch_attention(form, q, k, v, mask=mask, dropout=dropout, scale=scale), size)


def _attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, valid: Tensor | None, dropout: float, rows: RowEnd
) -> Tensor:
    """Compute ``attention_fused`` by FlashAttention, or by plain products if that does not take the call.

    torch's function for all kernels does not return log-sum-exps.
    """
    whole = form in (table.CAUSAL, table.FULL)
    if q.device.type == "cpu" and whole and not dropout:
        heads = equal_head_dims(q, k, v)
        y, lse = _cpu_forward(*heads[:3], 0.0, form == table.CAUSAL, scale=heads.scale)
        return cut_features(rows.end(y, lse), v.shape[-1])
    return attention_flash(q, k, v, form=form, valid=valid, dropout=dropout, rows=rows)


def keys_of_heads(valid: Tensor | None) -> Tensor:
    """Return the keys of all heads, [B, 1, 1 or S, L], for ``DeviceMask.valid``."""
    assert valid is not None
    return valid[:, None, None, :] if valid.dim() == 2 else valid[:, None]


def torch_attention(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Call torch's ``scaled_dot_product_attention``, without cuDNN if there is a mask or dropout.

    torch prefers cuDNN on Hopper and Blackwell. Its backward with a mask returns NaN for some lengths (torch's issue
    196678), and it rounds the probability of dropout to sixteenths. Keys and values are repeated for a kernel that
    takes them only with as many heads as the queries, since torch would store the scores instead.

    Args:
        form: Form of the call in the table. Heads have one size.
        mask: Keys that each position attends to, broadcast to [B, N, S, L] bool, or an alignment of the causal mask.
        scale: Scale of the scores; None for D^-0.5.
    """
    grouped = bool(k.shape[1] != q.shape[1])  # sizes are symbolic under torch.compile
    if grouped and table.repeats_heads(call_of(form, q, v, dropout)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    pinned = (mask is not None or dropout > 0.0) and capability_of(q) > (0, 0)
    with sdpa_kernel(list(WITHOUT_CUDNN)) if pinned else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=form == table.CAUSAL, scale=scale, enable_gqa=grouped
        )


def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, valid: Tensor | None = None, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``attention_reference`` by torch's FlashAttention where it takes the call, else by torch's choice.

    The operator is that of FlashAttention-3 once ``CudaDevice.activate_flash3`` has put it in place.
    """
    if not table.takes(table.FLASH, call_of(form, q, v, dropout, rows)):
        other = attention_fused if rows is None else attention_reference
        return other(q, k, v, form=form, valid=valid, dropout=dropout, rows=rows)
    size, scale = v.shape[-1], q.shape[-1] ** -0.5
    width = -(-max(q.shape[-1], size) // MULTIPLE) * MULTIPLE
    q, k, v = (pad_features(x, width) for x in (q, k, v))
    causal = form in (table.CAUSAL, table.LOWER_RIGHT)  # its causal mask is aligned to the lower right
    y, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)
    return cut_features(y if rows is None else rows.end(y, lse), size)


def attention_cudnn(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, valid: Tensor | None = None, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``attention_reference`` by cuDNN where it takes the call, else by torch's choice."""
    if not table.takes(table.CUDNN, call_of(form, q, v, dropout, rows)):
        return attention_fused(q, k, v, form=form, valid=valid, dropout=dropout, rows=rows)
    trains = q.requires_grad or k.requires_grad or v.requires_grad
    needs_lse = rows is not None or (torch.is_grad_enabled() and trains)
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    y, lse, *_ = attend(q, k, v, None, needs_lse, dropout, form == table.CAUSAL)
    return y if rows is None else rows.end(y, lse.reshape(q.shape[:3]))


def equal_head_dims(q: Tensor, k: Tensor, v: Tensor) -> EqualHeads:
    """Pad q and k [.., Dk] or v [.., Dv] to max(Dk, Dv) features. Copies nothing if the sizes are equal."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if key_dim == value_dim:
        return EqualHeads(q, k, v, None)
    size = max(key_dim, value_dim)
    return EqualHeads(pad_features(q, size), pad_features(k, size), pad_features(v, size), key_dim**-0.5)


def pad_features(x: Tensor, size: int) -> Tensor:
    """Pad [.., D] to [.., size] with zeros after the features. Returns ``x`` itself if it has that size."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def cut_features(x: Tensor, size: int) -> Tensor:
    """Undo ``pad_features``: return the first ``size`` features of [.., D], or ``x`` itself if it has that size."""
    return x if x.shape[-1] == size else x.narrow(-1, 0, size)


def kernel_head_dims(operator: str, like: Tensor, key_dim: int, value_dim: int) -> HeadWidths:
    """Return the head sizes to which the kernels of an operator would pad keys and values: those are not copied.

    operator: its name in the table of operators. like: a tensor of the dtype and on the device of the heads.
    """
    largest, kind = max(key_dim, value_dim), like.device.type
    if like.dtype == torch.float64 or kind not in ("cpu", "cuda", "npu"):
        return HeadWidths(key_dim, value_dim)
    if kind == "npu":
        return HeadWidths(largest, value_dim)  # only keys smaller than values are padded
    if kind == "cuda" and operator == "attention_flash" and like.dtype in (torch.bfloat16, torch.float16):
        largest = -(-largest // MULTIPLE) * MULTIPLE
    return HeadWidths(largest, largest)


def call_of(form: str, q: Tensor, v: Tensor, dropout: float, rows: Rows = None) -> table.AttentionCall:
    """Return the description of a call of this form, by which the table finds its kernels."""
    return table.AttentionCall(
        form,
        q.shape[-1],
        v.shape[-1],
        str(q.dtype).removeprefix("torch."),
        capability_of(q),
        dropout=dropout > 0.0,
        repeats=torch.are_deterministic_algorithms_enabled(),
        statistic="" if rows is None else rows.kind,
    )


def capability_of(like: Tensor) -> table.Capability:
    """Return the compute capability of the NVIDIA GPU that holds a tensor; (0, 0), which no row takes, elsewhere.

    torch's build for ROCm reports the number of AMD's architecture, 9.4 of an MI300X and 9.0 of an MI250, as if it were
    a compute capability.
    """
    return torch.cuda.get_device_capability(like.device) if like.is_cuda and torch.version.hip is None else (0, 0)
