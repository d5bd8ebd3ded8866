"""Attention of a block of queries to a block of keys, with the log-sum-exp of every row, forward and backward.

The blocks in a row of the attention matrix are merged by their log-sum-exps. So are their gradients: the backward of a
block with the merged output and log-sum-exp gives exactly its share (ring attention, arXiv 2310.01889).

Shape letters: B batch, N query heads, G key-value heads, S queries, L keys, D head size of queries and keys, V of
values and outputs. A causal block is square.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.attention.mask import causal_keys
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.device.attention.table import BLOCKS, FLASH, takes
from megapar.core.device.attention.whole import (
    EqualHeads,
    call_of,
    cut_features,
    equal_head_dims,
    pad_features,
    products_of,
)

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_forward = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


class AttentionBlock(NamedTuple):
    """Attention of some queries to some keys, with the statistics that its merge and its backward need.

    Attributes:
        out: [B, N, S, V] in the dtype of q.
        lse: [B, N, S], the log-sum-exp of the scores of each row, in max(fp32, dtype).
        drawn: Tensors, or numbers of a kernel's random state, that reproduce the dropout.
    """

    out: Tensor
    lse: Tensor
    drawn: tuple[Any, ...] = ()


class BlockGradients(NamedTuple):
    """Gradients of q [B, N, S, D], of k [B, G, L, D] and of v [B, G, L, V]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def block_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0, rows: Rows = None
) -> AttentionBlock:
    """Compute softmax(q k^T / sqrt(D)) v by plain products, q [B, N, S, D], k [B, G, L, D], v [B, G, L, V].

    Materializes all scores. ``dropout`` is the probability of dropping an attention weight; the log-sum-exp covers all
    weights. ``rows`` counts the rows by the scores of this block alone, as a maximum may be.
    """
    k, v = (_repeated(x, q) for x in (k, v))
    scores = _scores(q, k, causal=causal)
    lse = scores.logsumexp(-1)
    if rows is not None:
        rows.see_scores(scores)
    weights = (scores - lse.unsqueeze(-1)).exp().to(q.dtype)
    if not dropout:
        return AttentionBlock(weights @ v, lse)
    kept = F.dropout(torch.ones_like(weights), dropout)
    return AttentionBlock((weights * kept) @ v, lse, (kept,))


def block_backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, *, causal: bool, dropout: float = 0.0
) -> BlockGradients:
    """Return the block's share of the gradients; q, k, v, causal and dropout as in the forward.

    Args:
        grad: Gradient of the output, [B, N, S, V].
        block: Output and log-sum-exp merged over the whole row, and ``drawn`` of this block's forward.
    """
    k_N, v_N = (_repeated(x, q) for x in (k, v))
    exact = block.lse.dtype
    weights = (_scores(q, k_N, causal=causal) - block.lse.unsqueeze(-1)).exp()
    grad_weights = products_of(grad, v_N)
    dropped = weights
    if block.drawn:
        grad_weights, dropped = grad_weights * block.drawn[0], weights * block.drawn[0]
    row = (grad.to(exact) * block.out.to(exact)).sum(-1, keepdim=True)
    grad_scores = (weights * (grad_weights - row) * q.shape[-1] ** -0.5).to(q.dtype)
    dk, dv = grad_scores.mT @ q, dropped.to(q.dtype).mT @ grad
    return BlockGradients(grad_scores @ k_N, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv)))


def block_cpu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> AttentionBlock:
    """Compute ``block_reference`` by the CPU's fused kernel, which has no dropout."""
    if dropout:
        return block_reference(q, k, v, causal=causal, dropout=dropout)
    heads = equal_head_dims(q, k, v)
    out, lse = _cpu_forward(*heads[:3], 0.0, causal, scale=heads.scale)
    return AttentionBlock(cut_features(out, v.shape[-1]), lse)


def block_backward_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, *, causal: bool, dropout: float = 0.0
) -> BlockGradients:
    """Compute ``block_backward_reference`` by the backward of the same kernel."""
    if dropout:
        return block_backward_reference(grad, q, k, v, block, causal=causal, dropout=dropout)
    heads = equal_head_dims(q, k, v)
    grad, out = _padded_outputs(heads, grad, block.out)
    return _cut_gradients(_cpu_backward(grad, *heads[:3], out, block.lse, 0.0, causal, scale=heads.scale), q, v)


def block_cuda(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> AttentionBlock:
    """Compute ``block_reference`` by FlashAttention where the table of attention says that it takes the call."""
    heads = equal_head_dims(q, k, v)
    if not takes(FLASH, call_of(BLOCKS, heads.q, heads.v, dropout)):
        return block_reference(q, k, v, causal=causal, dropout=dropout)
    out, lse, *_, seed, offset, _ = _cuda_forward(*heads[:3], dropout, causal, scale=heads.scale)
    return AttentionBlock(cut_features(out, v.shape[-1]), lse, (seed, offset))


def block_backward_cuda(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, *, causal: bool, dropout: float = 0.0
) -> BlockGradients:
    """Compute ``block_backward_reference`` by FlashAttention's backward; ``drawn`` is its random state."""
    heads = equal_head_dims(q, k, v)
    if not takes(FLASH, call_of(BLOCKS, heads.q, heads.v, dropout)):
        return block_backward_reference(grad, q, k, v, block, causal=causal, dropout=dropout)
    grad, out = _padded_outputs(heads, grad, block.out)
    # Without cumulative sequence lengths (for uneven lengths) the kernel takes the lengths from the shapes.
    lengths = (None, None, q.shape[2], k.shape[2])
    # The kernel takes the address of the log-sum-exps and not their strides, which have gaps if the rows are a slice.
    merged = (out, block.lse.contiguous(), *lengths, dropout, causal, *block.drawn)
    return _cut_gradients(_cuda_backward(grad, *heads[:3], *merged, scale=heads.scale), q, v)


def _padded_outputs(heads: EqualHeads, grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the output and its gradient [B, N, S, V] for a kernel that supports one head size only."""
    size = heads.v.shape[-1]
    return pad_features(grad, size), pad_features(out, size)


def _cut_gradients(padded: Sequence[Tensor], q: Tensor, v: Tensor) -> BlockGradients:
    """Remove the padding from the gradients of q, k and v."""
    dq, dk, dv = padded
    size = q.shape[-1]
    return BlockGradients(cut_features(dq, size), cut_features(dk, size), cut_features(dv, v.shape[-1]))


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key-value heads to the number of query heads."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Return the scores [B, N, S, L] in max(fp32, dtype)."""
    scores = products_of(q, k) * q.shape[-1] ** -0.5
    return scores.masked_fill(~causal_keys(q.shape[2], k.shape[2], q.device), -torch.inf) if causal else scores
