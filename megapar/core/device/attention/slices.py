"""Causal attention of one slice of the sequence, whose positions attend to all keys up to their own.

    k, v   | keys of earlier slices: unmasked | own keys: causal |     q is above the last block

The packed forms attend inside documents only, and in a window if the slice has one, for which samples are documents,
too. A slice can contain any part of a document.

Shape letters: B batch, N query heads, G key-value heads, S positions of q, L of k and v, D head size of q and k, V of v
and the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import bias as alignments

from megapar.core.device.attention.documents import by_kernel
from megapar.core.device.attention.mask import DocumentSlice
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.device.attention.table import DOCUMENTS, LOWER_RIGHT, VARLEN, WINDOW, takes
from megapar.core.device.attention.whole import (
    attention_flash,
    attention_reference,
    call_of,
    cut_features,
    equal_head_dims,
    plain_attention,
    torch_attention,
)
from megapar.core.device.attention.windows import attention_window


def attention_slice_reference(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, rows: Rows = None) -> Tensor:
    """Compute causal attention of the last S of L positions: i attends to 0..L - S + i. See ``attention_reference``."""
    return attention_reference(q, k, v, form=LOWER_RIGHT, dropout=dropout, rows=rows)


def attention_slice_merged(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, rows: Rows = None) -> Tensor:
    """Compute ``attention_slice_reference`` by the CPU's fused kernel, which has no dropout."""
    if dropout > 0.0:
        return attention_slice_reference(q, k, v, dropout=dropout, rows=rows)
    out, lse = MergedAttention.apply(q, k, v)
    return cut_features(out if rows is None else rows.end(out, lse), v.shape[-1])


def attention_slice_fused(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, rows: Rows = None) -> Tensor:
    """Compute ``attention_slice_reference`` by torch's fused kernels, without materializing a mask."""
    if rows is not None:
        return attention_flash(q, k, v, form=LOWER_RIGHT, dropout=dropout, rows=rows)
    bias = alignments.causal_lower_right(q.shape[2], k.shape[2])
    size = v.shape[-1]
    q, k, v, scale = equal_head_dims(q, k, v)
    return cut_features(torch_attention(LOWER_RIGHT, q, k, v, mask=bias, dropout=dropout, scale=scale), size)


def packed_attention_slice_reference(
    q: Tensor, k: Tensor, v: Tensor, *, documents: DocumentSlice, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``attention_slice_reference`` inside documents and the window of a slice (``DeviceMask.cut``).

    In a window k and v begin with ``DocumentSlice.first_key``.
    """
    return plain_attention(q, k, v, documents.visible[:, None], dropout, rows)


def packed_attention_slice_merged(
    q: Tensor, k: Tensor, v: Tensor, *, documents: DocumentSlice, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``packed_attention_slice_reference`` by ``attention_slice_merged``, document by document."""
    return _by_document(attention_slice_merged, q, k, v, documents, dropout, rows)


def packed_attention_slice_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, documents: DocumentSlice, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``packed_attention_slice_reference`` by torch's kernel for variable lengths, else a call per document."""
    window = documents.window
    if not takes(VARLEN, call_of(DOCUMENTS if window is None else WINDOW, q, v, dropout, rows)):
        return _by_document(attention_slice_fused, q, k, v, documents, dropout, rows)
    starts = (documents.starts_q, documents.starts_k)
    return by_kernel(q, k, v, starts, documents.longest, window=window, dropout=dropout, rows=rows)


def _by_document(
    form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, documents: DocumentSlice, dropout: float, rows: Rows
) -> Tensor:
    """Call ``form`` for each document's part of the slice, with all keys of the document up to it.

    A part with more keys than the window takes the calls of ``attention_window``. Samples that are alike are one call.
    """
    before, pieces, window = k.shape[2] - q.shape[2], documents.pieces, documents.window

    def attend(heads: tuple[Tensor, ...], samples: slice, queries: slice, first: int) -> Tensor:
        keys, (q, k, v) = slice(first, before + queries.stop), heads
        chosen = form
        if window is not None and keys.stop - keys.start > window:
            chosen = partial(attention_window, window=window)
        seen = None if rows is None else rows.at(samples, queries)
        return chosen(q[:, :, queries], k[:, :, keys], v[:, :, keys], dropout=dropout, rows=seen)

    if len(pieces) == len(q) and all(piece[1:] == pieces[0][1:] for piece in pieces):
        return attend((q, k, v), slice(None), *pieces[0][1:])
    one = list(zip(*(x.split(1) for x in (q, k, v)), strict=True))
    outputs: list[list[Tensor]] = [[] for _ in one]
    for sample, queries, first in pieces:
        outputs[sample].append(attend(one[sample], slice(sample, sample + 1), queries, first))
    return torch.cat([torch.cat(parts, dim=2) for parts in outputs])


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class MergedAttention(torch.autograd.Function):
    """Attention of q [B, N, S, D], k [B, G, L, D], v [B, G, L, V] to [B, N, S, V]; position i attends to 0..P + i.

    A CPU's kernel supports top-left alignment only, so the keys are divided at P = L - S:

        k, v   | prefix: unmasked | diagonal: causal |      q is above the diagonal block
        o      merged from both by their log-sum-exps, and so is the gradient: each part's backward with the merged
               output and log-sum-exp gives exactly the share of that part (as in ring attention, arXiv 2310.01889)
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute both parts and merge them to [B, N, S, max(V, D)]. Also return the log-sum-exps [B, N, S]."""
        prefix, ctx.value_dim = k.shape[2] - q.shape[2], v.shape[-1]
        ctx.key_dim = q.shape[-1]
        q, k, v, ctx.scale = equal_head_dims(q, k, v)
        out, lse = _forward(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=ctx.scale)
        if prefix:
            before, lse_before = _forward(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=ctx.scale)
            whole = torch.logaddexp(lse, lse_before)
            shares = [(part - whole).exp().unsqueeze(-1) for part in (lse, lse_before)]
            out, lse = (out * shares[0] + before * shares[1]).to(q.dtype), whole
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq [B, N, S, D], dk [B, G, L, D] and dv [B, G, L, V]."""
        q, k, v, out, lse = ctx.saved_tensors
        prefix, grad, scaled = k.shape[2] - q.shape[2], grads[0], {"scale": ctx.scale}
        dq, dk, dv = _backward(grad, q, k[:, :, prefix:], v[:, :, prefix:], out, lse, 0.0, True, **scaled)
        if prefix:
            before = _backward(grad, q, k[:, :, :prefix], v[:, :, :prefix], out, lse, 0.0, False, **scaled)
            dq = dq + before[0]
            dk, dv = torch.cat((before[1], dk), dim=2), torch.cat((before[2], dv), dim=2)
        return cut_features(dq, ctx.key_dim), cut_features(dk, ctx.key_dim), cut_features(dv, ctx.value_dim)
