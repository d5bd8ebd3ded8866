"""Attention that the tests of layers and of context parallelism share."""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention.documents import packed_attention_reference
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.table import DOCUMENTS, form_of
from megapar.core.device.attention.whole import attention_reference
from megapar.model.attention.self_attention import SelfAttention
from megapar.model.attention.slices import CausalSlices
from megapar.model.layers.context import Context


def causal_mask(samples: int, length: int, ends=None) -> DeviceMask:
    return DeviceMask.of(AttentionMask.of(samples, length, causal=True, ends=ends), torch.device("cpu"))


def plain_attention_of(mask: AttentionMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of whole samples by the reference; q [B, N, S, D], k [B, G, S, D], v [B, G, S, V] to [B, N, S, V]."""
    if form_of(mask) == DOCUMENTS:
        return packed_attention_reference(q, k, v, mask=DeviceMask.of(mask, torch.device("cpu")))
    valid = None if mask.lengths is None else torch.arange(mask.length) < torch.tensor(mask.lengths)[:, None]
    return attention_reference(q, k, v, form=form_of(mask), valid=valid)


def sliced(attention: SelfAttention, x: Tensor, context: Context, *, prepared: bool, hides: bool = False) -> Tensor:
    """The output for x, slice after slice, from heads of the whole or from each slice's own."""
    run, parts = CausalSlices(attention, context, hides=hides), []
    if prepared:
        run.prepare(x)
    for number, place in enumerate(context.own_slices):
        run.enter(None if prepared else x[:, place])
        run.project(number)
        run.attend(number)
        run.leave(number)
        parts.append(run.finish(number))
    return torch.cat(parts, dim=1)
