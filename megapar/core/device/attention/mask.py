"""Attention masks on a device: the tensors that kernels read, in addition to the value on the host.

Shape letters: B batch, S positions of queries, L of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention.table import form_of

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class DeviceMask:
    """The mask of a micro-batch and its tensors, made once for all layers.

    Attributes:
        host: The mask.
        valid: Keys that are not hidden, [B, L] bool; with a memory those of each position, [B or 1, S, L]. None: those
            of the form.
        starts: [documents + 1] int32, 0 and ``host.flat_ends``; None without documents.
    """

    host: AttentionMask
    valid: Tensor | None = None
    starts: Tensor | None = None
    _slices: dict[tuple[int, int], DocumentSlice] = field(default_factory=dict, compare=False, repr=False)
    _windows: dict[int, DeviceMask] = field(default_factory=dict, compare=False, repr=False)
    _samples: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, mask: AttentionMask, device: torch.device, ends: Tensor | None = None) -> DeviceMask:
        """Put the documents of a mask, if it has any, on a device.

        ends: [documents], its ``flat_ends`` on the host; None makes them. If they are in pinned memory, the host does
        not wait for the copy.
        """
        if mask.ends is None:
            return cls(mask)
        ends_D = torch.tensor(mask.flat_ends) if ends is None else ends
        return cls(mask, starts=F.pad(ends_D.to(device, non_blocking=True), (1, 0)).to(torch.int32))

    @classmethod
    def of_memory(cls, mask: AttentionMask, text: Tensor | None, device: torch.device) -> DeviceMask:
        """Make the mask of a segment whose positions attend to a memory and, causally, to each other.

        text: [B, M] bool, False at padding in the memory. Padding comes after the text, so that text in the segment
        does not attend to padding there.
        """
        visible = causal_keys(mask.length, mask.memory + mask.length, device, before=mask.memory)[None]
        if text is not None:
            visible = visible & torch.cat((text, text.new_ones(len(text), mask.length)), dim=1)[:, None]
        return cls(mask, visible)

    @cached_property
    def form(self) -> str:
        """The form of a call of attention with this mask, in the table of kernels."""
        return form_of(self.host)

    def within(self, window: int) -> DeviceMask:
        """Return ``AttentionMask.within`` on the device. All layers with this window share the result."""
        host = self.host.within(window)
        if host is self.host:
            return self
        if window not in self._windows:
            self._windows[window] = DeviceMask(host, self.valid, self.starts)
        return self._windows[window]

    def starts_on(self, device: torch.device) -> Tensor:
        """Return ``starts``, or those of ``host``, which without documents are the samples', made once."""
        if self.starts is not None:
            return self.starts
        if device not in self._samples:
            samples, length = self.host.samples, self.host.length
            if self.host.ends is None:  # made there: a copy would have the host wait
                starts = torch.arange(samples + 1, dtype=torch.int32, device=device) * length
            else:
                starts = torch.tensor((0, *self.host.flat_ends), dtype=torch.int32).to(device)
            self._samples[device] = starts
        return self._samples[device]

    def cut(self, place: slice, device: torch.device = _CPU) -> DocumentSlice:
        """Return the parts of documents in a slice of the sequence. All layers share the result.

        Args:
            place: Positions of the slice in each sample.
            device: Where the kernel reads ``starts``, if this mask has none.
        """
        key = (place.start, place.stop)
        if key not in self._slices:
            before = 0 if self.host.window is None else self.host.first_key(place.start)
            pieces, longest = _pieces(self.host, place, before), _longest(self.host, place, before)
            starts, window = self.starts_on(device), self.host.window
            sizes = self.host.samples, self.host.length
            self._slices[key] = DocumentSlice(pieces, longest, place, *sizes, starts, before, window)
        return self._slices[key]


class DocumentPiece(NamedTuple):
    """The part of a document that is in a slice of the sequence.

    Attributes:
        queries: Positions of the part, relative to the start of the slice.
        first: Start of the document, or of its keys in a window, relative to the first key of the slice.
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
        samples: Samples of the micro-batch.
        length: Positions of a sample.
        starts: As in ``DeviceMask``.
        first_key: Position of the first key that the slice takes: 0, or in a window the first that a query sees.
        window: As in ``AttentionMask``.
    """

    pieces: tuple[DocumentPiece, ...]
    longest: tuple[int, int]
    place: slice
    samples: int
    length: int
    starts: Tensor
    first_key: int = 0
    window: int | None = None

    @cached_property
    def starts_q(self) -> Tensor:
        """[documents + 1] int32: start of each document among the queries; documents outside the slice are empty."""
        sample, first = self.starts // self.length, self.starts % self.length
        size = self.place.stop - self.place.start
        return sample * size + (first - self.place.start).clamp(0, size)

    @cached_property
    def starts_k(self) -> Tensor:
        """[documents + 1] int32: start of each document among the keys, which end with the slice."""
        sample, first = self.starts // self.length, self.starts % self.length
        size = self.place.stop - self.first_key
        return sample * size + (first - self.first_key).clamp(0, size)

    @cached_property
    def visible(self) -> Tensor:
        """[B, S, L] bool: keys that each query of a causal mask attends to, for plain products, without a host copy."""
        queries, keys = (self._numbers(first) for first in (self.place.start, self.first_key))
        before = self.place.start - self.first_key
        seen = causal_keys(queries.shape[1], keys.shape[1], self.starts.device, before, self.window)
        return (queries[:, :, None] == keys[:, None]) & seen

    def _numbers(self, first: int) -> Tensor:
        """Return the number of the document of each position from ``first`` to the end of the slice, [B, any]."""
        of_row = torch.arange(first, self.place.stop, dtype=torch.int32, device=self.starts.device)
        starts = self.length * torch.arange(self.samples, dtype=torch.int32, device=self.starts.device)
        return torch.searchsorted(self.starts[1:], starts[:, None] + of_row, right=True)


def causal_keys(queries: int, keys: int, device: torch.device, before: int = 0, window: int | None = None) -> Tensor:
    """Return [queries, keys] bool: position i attends to keys 0..before + i, or only to the last ``window`` of them."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before + 1 - window)


def _documents(mask: AttentionMask) -> Iterator[tuple[int, int, int]]:
    """Yield (sample, start, end in the sample) of each document."""
    for start, end in zip((0, *mask.flat_ends), mask.flat_ends, strict=False):
        sample = start // mask.length
        yield sample, start - sample * mask.length, end - sample * mask.length


def _longest(mask: AttentionMask, place: slice, before: int) -> tuple[int, int]:
    queries = keys = 0
    for _, first, last in _documents(mask):
        queries = max(queries, min(last, place.stop) - max(first, place.start))
        keys = max(keys, min(last, place.stop) - max(first, before))
    return queries, keys


def _pieces(mask: AttentionMask, place: slice, before: int) -> tuple[DocumentPiece, ...]:
    pieces = []
    for sample, first, last in _documents(mask):
        start, stop = max(first, place.start), min(last, place.stop)
        if start < stop:
            queries = slice(start - place.start, stop - place.start)
            pieces.append(DocumentPiece(sample, queries, max(first, before) - before))
    return tuple(pieces)
