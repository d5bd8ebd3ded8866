"""Attention inside the documents of packed samples: block-diagonal, with an S x S mask in the causal reference only.

Samples without their padding are documents, too: one after another, each with attention to all of its positions.

Shape letters: B batch, S sequence, T = B S, N query heads, G key-value heads, D head size of queries and keys, V of
values and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention import attention_fused, attention_reference, call_of
from megapar.core.device.attention_table import DOCUMENTS, VARLEN, takes
from megapar.core.device.head_dims import cut_features, equal_head_dims
from megapar.core.torch_names import varlen_attention


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of a packed micro-batch of T = B S positions. None of them crosses the end of a sample.

    Attributes:
        mask: The mask, with the ends of the documents, on the host.
        starts: [documents + 1] int32, 0 and the same ends, on the device of the activations; for kernels.
    """

    mask: AttentionMask
    starts: Tensor
    _slices: dict[tuple[int, int], DocumentSlice] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, mask: AttentionMask, device: torch.device, ends: Tensor | None = None) -> PackedDocuments:
        """Put the documents of a mask on a device.

        Args:
            mask: The mask.
            device: Device of the activations.
            ends: [documents], its ``flat_ends`` on the host. The host does not wait for the copy if they are in pinned
                memory; None makes them.
        """
        ends_D = torch.tensor(mask.flat_ends) if ends is None else ends
        return cls(mask, F.pad(ends_D.to(device, non_blocking=True), (1, 0)).to(torch.int32))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Position after each document, ascending to T."""
        return self.mask.flat_ends

    @property
    def lengths(self) -> list[int]:
        """Number of positions of each document."""
        return [end - start for start, end in zip((0, *self.ends), self.ends, strict=False)]

    def cut(self, place: slice) -> DocumentSlice:
        """Return the parts of documents in a slice of the sequence. All layers share the result.

        place: Positions of the slice in each sample.
        """
        key = (place.start, place.stop)
        if key not in self._slices:
            length = self.mask.length
            self._slices[key] = DocumentSlice(
                self._pieces(place, length), self._longest(place, length), place, length, self.starts
            )
        return self._slices[key]

    def _longest(self, place: slice, length: int) -> tuple[int, int]:
        queries = keys = 0
        for start, end in zip((0, *self.ends), self.ends, strict=False):
            first, last = start % length, start % length + end - start
            queries = max(queries, min(last, place.stop) - max(first, place.start))
            keys = max(keys, min(last, place.stop) - min(first, place.stop))
        return queries, keys

    def _pieces(self, place: slice, length: int) -> tuple[DocumentPiece, ...]:
        pieces = []
        for start, end in zip((0, *self.ends), self.ends, strict=False):
            sample = start // length
            first, last = start - sample * length, end - sample * length
            queries = slice(max(first, place.start), min(last, place.stop))
            if queries.start < queries.stop:
                pieces.append(
                    DocumentPiece(sample, slice(queries.start - place.start, queries.stop - place.start), first)
                )
        return tuple(pieces)


class DocumentPiece(NamedTuple):
    """The part of a document that is in a slice of the sequence.

    Attributes:
        sample: Number of the sample.
        queries: Positions of the part, relative to the start of the slice.
        first: Start of the document in its sample.
    """

    sample: int
    queries: slice
    first: int


@dataclass(frozen=True)
class DocumentSlice:
    """The parts of documents in a slice of the sequence.

    Attributes:
        pieces: The non-empty parts, in order.
        longest: The most queries of a document, and the most keys, also of a document without a query.
        place: Positions of the slice in each sample.
        length: Positions of a sample.
        starts: As in ``PackedDocuments``.
    """

    pieces: tuple[DocumentPiece, ...]
    longest: tuple[int, int]
    place: slice
    length: int
    starts: Tensor

    @cached_property
    def starts_q(self) -> Tensor:
        """[documents + 1] int32: start of each document among the queries; documents outside the slice are empty."""
        sample, first = self.starts // self.length, self.starts % self.length
        size = self.place.stop - self.place.start
        starts: Tensor = sample * size + (first - self.place.start).clamp(0, size)
        return starts

    @cached_property
    def starts_k(self) -> Tensor:
        """[documents + 1] int32: start of each document among the keys, which end with the slice."""
        sample, first = self.starts // self.length, self.starts % self.length
        starts: Tensor = sample * self.place.stop + first.clamp(max=self.place.stop)
        return starts


def packed_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, documents: PackedDocuments, dropout: float = 0.0
) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v inside each document. Materializes all scores, of all documents if causal.

    Each key-value head serves N / G consecutive query heads.

    Args:
        q: [B, N, S, D].
        k: [B, G, S, D].
        v: [B, G, S, V].
        documents: The documents of the micro-batch.
        dropout: Dropout probability of the attention weights.

    Returns:
        [B, N, S, V].
    """
    if not documents.mask.causal:
        return _by_length(partial(attention_reference, causal=False, dropout=dropout), q, k, v, documents)
    batch, _, length, size = q.shape
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    number = torch.repeat_interleave(torch.tensor(documents.lengths)).to(q.device).view(batch, 1, length)
    visible = (number.mT == number).tril()[:, None]  # [B, 1, S, S]
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * size**-0.5
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1).to(q.dtype)
    return F.dropout(weights, dropout, training=dropout > 0.0) @ v


def packed_attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, *, documents: PackedDocuments, dropout: float = 0.0
) -> Tensor:
    """Compute ``packed_attention_reference`` by one fused call for each run of documents of one length."""
    return _by_length(partial(attention_fused, causal=documents.mask.causal, dropout=dropout), q, k, v, documents)


def packed_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, documents: PackedDocuments, dropout: float = 0.0
) -> Tensor:
    """Compute ``packed_attention_reference`` by torch's kernel for sequences of variable lengths, if it takes them.

    Otherwise documents of one length are one call.
    """
    if not takes(VARLEN, call_of(DOCUMENTS, q, v, dropout)):
        return packed_attention_by_document(q, k, v, documents=documents, dropout=dropout)
    longest = max(documents.lengths)
    starts = (documents.starts, documents.starts)
    return by_kernel(q, k, v, starts, (longest, longest), causal=documents.mask.causal, dropout=dropout)


def by_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Call torch's kernel for variable lengths, which takes a single head size.

    If ``causal``, the last query of a document sees all of its keys. Documents may have keys and no query. The kernel
    writes their gradients, zero, only up to the most keys, so these count, too.

    Args:
        q: [B, N, S, D].
        k: [B, G, L, D].
        v: [B, G, L, V].
        starts: Starts of the documents among the queries and among the keys of all samples, [documents + 1] int32.
        longest: The most queries and the most keys of a document.
        causal: See above; False: all queries of a document see all of its keys.
        dropout: Dropout probability of the attention weights.

    Returns:
        [B, N, S, V].
    """
    size = v.shape[-1]
    q, k, v, scale = equal_head_dims(q, k, v)
    scaled = {} if scale is None else {"scale": scale}
    query, key, value = (_with_features_together(_flat(x)) for x in (q, k, v))
    if dropout:  # torch's function has no such argument, its operator has
        flash = torch.ops.aten._flash_attention_forward
        y = flash(query, key, value, *starts, *longest, dropout, causal, False, **scaled)[0]
    else:
        window = (-1, 0) if causal else (-1, -1)
        y = varlen_attention(query, key, value, *starts, *longest, window_size=window, **scaled)
    assert isinstance(y, Tensor)
    return _unflat(cut_features(y, size), q)


def _by_length(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments
) -> Tensor:
    """Call ``form`` for each run of consecutive documents of one length, as samples of a batch."""
    runs = [(length, len(list(run))) for length, run in groupby(documents.lengths)]
    sizes = [length * count for length, count in runs]
    outputs = []
    for (length, count), *own in zip(runs, *(_in_row(x).split(sizes, dim=1) for x in (q, k, v)), strict=True):
        if count > 1:
            own = [x.view(count, length, *x.shape[2:]) for x in own]
        y = form(*(x.transpose(1, 2) for x in own)).transpose(1, 2)
        outputs.append(y if count == 1 else y.reshape(1, -1, *y.shape[2:]))
    y = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    return y.view(q.shape[0], q.shape[2], *y.shape[2:]).transpose(1, 2)


def _in_row(x: Tensor) -> Tensor:
    """Reorder [B, heads, S, D] to [1, B S, heads, D]."""
    x = x.transpose(1, 2)
    return x if x.shape[0] == 1 else x.flatten(0, 1)[None]


def _with_features_together(x: Tensor) -> Tensor:
    """Copy a tensor unless the features of a head are together, which is all that the kernel needs."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _flat(x: Tensor) -> Tensor:
    """Reorder [B, heads, S, D] to [T, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _unflat(y: Tensor, like: Tensor) -> Tensor:
    """Reorder [T, heads, D] to [B, heads, S, D]."""
    return y.view(like.shape[0], like.shape[2], *y.shape[1:]).transpose(1, 2)
