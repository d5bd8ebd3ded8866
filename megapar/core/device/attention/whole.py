"""Attention of whole samples: the plain reference, torch's choice of a fused kernel, and kernels chosen by name.

``attention_table`` says which kernel takes which call.

Shape letters: B batch, S sequence, N query heads, G key-value heads, D head size of queries and keys, V of values and
outputs.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapar.core.device.attention.head_dims import HeadWidths, cut_features, equal_head_dims, pad_features
from megapar.core.device.attention.table import (
    CAUSAL,
    CUDNN,
    FLASH,
    FULL,
    MASKED,
    AttentionCall,
    Capability,
    repeats_heads,
    takes,
)
from megapar.core.device.dtypes import at_least_fp32

MULTIPLE = 8  # features of a head that FlashAttention takes
WITHOUT_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, valid: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute grouped-query attention softmax(q k^T / sqrt(D)) v by plain products. Materializes all scores.

    Each key-value head serves N / G consecutive query heads.

    Args:
        q: [B, N, S, D].
        k: [B, G, S, D].
        v: [B, G, S, V].
        causal: Position i attends to 0..i.
        valid: [B, S] bool, False for padding keys. Ignored if causal: padding is after the text, whose positions do
            not attend to it.
        dropout: Dropout probability of the attention weights.

    Returns:
        [B, N, S, V].
    """
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(at_least_fp32(q.dtype)) * q.shape[-1] ** -0.5
    least = torch.finfo(scores.dtype).min  # not -inf: a sample that is all padding must stay finite
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, least)
    elif valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], least)
    weights = F.dropout(scores.softmax(-1).to(q.dtype), dropout, training=dropout > 0.0)
    return weights @ v


def attention_fused(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, valid: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute ``attention_reference`` by torch's fused kernels, without materializing the scores."""
    mask = None if causal or valid is None else valid[:, None, None, :]
    form, size = CAUSAL if causal else FULL if mask is None else MASKED, v.shape[-1]
    q, k, v, scale = equal_head_dims(q, k, v)
    return cut_features(torch_attention(form, q, k, v, mask=mask, dropout=dropout, scale=scale), size)


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
        form: Form of the call in the table.
        q: [B, N, S, D].
        k: [B, G, L, D].
        v: [B, G, L, D].
        mask: Keys that each position attends to, broadcast to [B, N, S, L] bool, or an alignment of the causal mask.
        dropout: Dropout probability of the attention weights.
        scale: Scale of the scores; None for D^-0.5.
    """
    grouped = bool(k.shape[1] != q.shape[1])  # sizes are symbolic under torch.compile
    if grouped and repeats_heads(call_of(form, q, v, dropout)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    pinned = (mask is not None or dropout > 0.0) and capability_of(q) > (0, 0)
    with sdpa_kernel(list(WITHOUT_CUDNN)) if pinned else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=form == CAUSAL, scale=scale, enable_gqa=grouped
        )


def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, valid: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute ``attention_reference`` by torch's FlashAttention where it takes the call, else by torch's choice.

    The operator is that of FlashAttention-3 once ``CudaDevice.activate_attention`` has put it in place.
    """
    if not _fits(FLASH, q, v, causal, valid, dropout):
        return attention_fused(q, k, v, causal=causal, valid=valid, dropout=dropout)
    size, scale = v.shape[-1], q.shape[-1] ** -0.5
    width = -(-max(q.shape[-1], size) // MULTIPLE) * MULTIPLE
    q, k, v = (pad_features(x, width) for x in (q, k, v))
    y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]
    return cut_features(y, size)


def attention_cudnn(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, valid: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Compute ``attention_reference`` by cuDNN where it takes the call, else by torch's choice."""
    if not _fits(CUDNN, q, v, causal, valid, dropout):
        return attention_fused(q, k, v, causal=causal, valid=valid, dropout=dropout)
    needs_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    y: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, needs_lse, dropout, causal)[0]
    return y


def _fits(kernel: str, q: Tensor, v: Tensor, causal: bool, valid: Tensor | None, dropout: float) -> bool:
    """Return True if the kernel of this name takes the call. It takes no mask but the causal one."""
    form = CAUSAL if causal else FULL if valid is None else None
    return form is not None and takes(kernel, call_of(form, q, v, dropout))


def kernel_head_dims(operator: str, like: Tensor, key_dim: int, value_dim: int) -> HeadWidths:
    """Return the head sizes to which the kernels of an operator would pad keys and values.

    Heads that have these sizes already are not copied.

    Args:
        operator: Its name in the table of operators.
        like: A tensor of the dtype and on the device of the heads.
        key_dim: Head size of queries and keys.
        value_dim: Head size of values.
    """
    largest, kind = max(key_dim, value_dim), like.device.type
    if like.dtype == torch.float64 or kind not in ("cpu", "cuda", "npu"):
        return HeadWidths(key_dim, value_dim)
    if kind == "npu":
        return HeadWidths(largest, value_dim)  # only keys smaller than values are padded
    if kind == "cuda" and operator == "attention_flash" and like.dtype in (torch.bfloat16, torch.float16):
        largest = -(-largest // MULTIPLE) * MULTIPLE
    return HeadWidths(largest, largest)


def call_of(form: str, q: Tensor, v: Tensor, dropout: float) -> AttentionCall:
    """Return the description of a call of this form, by which the table finds its kernels."""
    return AttentionCall(
        form,
        q.shape[-1],
        v.shape[-1],
        str(q.dtype).removeprefix("torch."),
        capability_of(q),
        dropout=dropout > 0.0,
        repeats=torch.are_deterministic_algorithms_enabled(),
    )


def capability_of(like: Tensor) -> Capability:
    """Return the compute capability of the NVIDIA GPU that holds a tensor; (0, 0), which no row takes, elsewhere.

    torch's build for ROCm reports the number of AMD's architecture, 9.4 of an MI300X and 9.0 of an MI250, as if it were
    a compute capability.
    """
    return torch.cuda.get_device_capability(like.device) if like.is_cuda and torch.version.hip is None else (0, 0)
