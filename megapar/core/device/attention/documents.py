"""Attention inside the documents of packed samples: block-diagonal, with an S x S mask in the causal reference only.

Samples without their padding are documents, too: one after another, each with attention to all of its positions. So are
the samples of a layer with a window.

Shape letters: B batch, S sequence, T = B S, N query heads, G key-value heads, D head size of queries and keys, V of
values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.device.attention.table import CAUSAL, FULL, VARLEN, takes
from megapar.core.device.attention.whole import (
    attention_fused,
    attention_reference,
    call_of,
    cut_features,
    equal_head_dims,
    plain_attention,
)
from megapar.core.device.attention.windows import attention_window
from megapar.core.device.kinds import device_class
from megapar.core.torch_names import varlen_attention


def packed_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, mask: DeviceMask, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``attention_reference`` inside each document. Materializes all scores, of all documents if causal."""
    if not mask.host.causal:
        return _by_length(partial(attention_reference, form=FULL, dropout=dropout), q, k, v, mask.host, rows)
    visible = mask.cut(slice(0, mask.host.length), q.device).visible[:, None]
    return plain_attention(q, k, v, visible, dropout, rows)


def packed_attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, *, mask: DeviceMask, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``packed_attention_reference`` by one fused call for each run of documents of one length.

    A document longer than the window takes the calls of ``attention_window``.
    """
    whole = partial(attention_fused, form=CAUSAL if mask.host.causal else FULL, dropout=dropout)
    window = mask.host.window
    if window is None:
        return _by_length(whole, q, k, v, mask.host, rows)
    within = partial(attention_window, window=window, dropout=dropout)

    def either(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return (within if q.shape[2] > window else whole)(q, k, v, rows=rows)

    return _by_length(either, q, k, v, mask.host, rows)


def are_long(mask: AttentionMask, least: int) -> bool:
    """Return True if each document is a call by itself: none is shorter than ``least`` (0: never), all are causal."""
    return least > 0 and mask.causal and mask.window is None and min(mask.document_lengths) >= least


def packed_attention_filled(q: Tensor, k: Tensor, v: Tensor, *, mask: DeviceMask, step: int) -> Tensor:
    """Compute ``packed_attention_reference`` by fused calls of whole samples, each document filled with zeros.

    cuDNN plans each new length, for 0.13 s on an H100, so that there are few: multiples of ``step``. No position of a
    causal document attends to what follows it, and the gradients of that are cut.
    """

    def filled(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        length = q.shape[2]
        longer = [F.pad(x, (0, 0, 0, -length % step)) if length % step else x for x in (q, k, v)]
        return attention_fused(*longer, form=CAUSAL, rows=rows).narrow(2, 0, length)

    return _by_length(filled, q, k, v, mask.host, None)


def packed_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, mask: DeviceMask, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``packed_attention_reference`` by torch's kernel for sequences of variable lengths, if it takes them.

    Otherwise documents of one length are one call, and so are long ones, where the device's class says so.
    """
    if not takes(VARLEN, call_of(mask.form, q, v, dropout, rows)):
        return packed_attention_by_document(q, k, v, mask=mask, dropout=dropout, rows=rows)
    shared = device_class(q.device.type)
    if rows is None and not dropout and are_long(mask.host, shared.least_document):
        return packed_attention_filled(q, k, v, mask=mask, step=shared.document_step)
    host, starts, longest = mask.host, mask.starts_on(q.device), max(mask.host.document_lengths)
    both = (starts, starts), (longest, longest)
    return by_kernel(q, k, v, *both, causal=host.causal, window=host.window, dropout=dropout, rows=rows)


def by_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    causal: bool = True,
    window: int | None = None,
    dropout: float = 0.0,
    rows: Rows = None,
) -> Tensor:
    """Call torch's kernel for variable lengths, which takes a single head size. Shapes as of ``attention_reference``.

    If ``causal``, the last query of a document sees all of its keys; otherwise all of its queries do. Documents may
    have keys and no query. The kernel writes their gradients, zero, only up to the most keys, so these count, too.

    Args:
        starts: Starts of the documents among the queries and among the keys of all samples, [documents + 1] int32.
        longest: The most queries and the most keys of a document.
        window: The most keys that a position of a causal call attends to, itself included; None for any number.
    """
    size = v.shape[-1]
    q, k, v, scale = equal_head_dims(q, k, v)
    scaled = {} if scale is None else {"scale": scale}
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # [T, heads, D]
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in packed)  # all that the kernel needs
    if dropout or rows is not None:  # torch's function has no such argument, its operator has
        flash = torch.ops.aten._flash_attention_forward
        more = scaled if window is None else {**scaled, "window_size_left": window - 1, "window_size_right": 0}
        y, lse, *_ = flash(query, key, value, *starts, *longest, dropout, causal, False, **more)  # lse [N, T]
        if rows is not None:
            y = rows.run(0, 1, lse.shape[1]).end(y.transpose(0, 1)[None], lse[None])[0].transpose(0, 1)
    else:
        left = -1 if window is None else window - 1  # keys before a position; -1 for all
        y = varlen_attention(query, key, value, *starts, *longest, window_size=(left, 0 if causal else -1), **scaled)
    assert isinstance(y, Tensor)
    return cut_features(y, size).view(q.shape[0], q.shape[2], -1, size).transpose(1, 2)


def _by_length(form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, rows: Rows) -> Tensor:
    """Call ``form`` for each run of consecutive documents of one length, as samples of a batch."""
    runs = [(length, len(list(run))) for length, run in groupby(mask.document_lengths)]
    sizes = [length * count for length, count in runs]
    outputs: list[Tensor] = []
    first = 0
    for (length, count), *own in zip(runs, *(_in_row(x).split(sizes, dim=1) for x in (q, k, v)), strict=True):
        if count > 1:
            own = [x.view(count, length, *x.shape[2:]) for x in own]
        seen = None if rows is None else rows.run(first, count, length)
        y = form(*(x.transpose(1, 2) for x in own), rows=seen).transpose(1, 2)
        first += count * length
        outputs.append(y if count == 1 else y.reshape(1, -1, *y.shape[2:]))
    y = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    return y.view(q.shape[0], q.shape[2], *y.shape[2:]).transpose(1, 2)


def _in_row(x: Tensor) -> Tensor:
    """Reorder [B, heads, S, D] to [1, B S, heads, D]."""
    x = x.transpose(1, 2)
    return x if x.shape[0] == 1 else x.flatten(0, 1)[None]
