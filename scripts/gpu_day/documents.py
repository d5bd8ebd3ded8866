"""Attention of documents: one call of a fused kernel per document against torch's kernel for variable lengths.

Documents of one length are one call. The kernels of cuDNN are built from a plan per shape, which the host makes at the
first call of each length: new lengths in a row show what that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.packed_attention import (
    PackedDocuments,
    packed_attention_by_document,
    packed_attention_varlen,
)
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.timed import NO_GPU, both_ways, median_seconds, normal

LENGTH, SMALL_LENGTH = 16384, 64
EQUAL = (2, 4, 8, 16)
UNEQUAL = {  # shares of the positions
    "3 unequal": (0.55, 0.3, 0.15),
    "6 unequal": (0.35, 0.25, 0.15, 0.12, 0.08, 0.05),
}
NEW_LENGTHS = 20
SECONDS_OF_A_SPLIT = 2.0


class Heads(NamedTuple):
    """Heads of a model.

    Attributes:
        queries: Query heads.
        groups: Key-value heads.
        size: Features of a head.
        causal: A position attends to earlier ones and itself only.
    """

    queries: int
    groups: int
    size: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.queries}/{self.groups} heads of {self.size}, {'causal' if self.causal else 'full'}"


HEADS = (  # ERNIE's first
    Heads(16, 16, 128, False),
    Heads(16, 4, 128, True),
    Heads(16, 16, 128, True),
    Heads(16, 16, 64, False),
)
FORMS: dict[str, tuple[Callable[..., Tensor], SDPBackend | None]] = {
    "varlen": (packed_attention_varlen, None),
    "by document, torch chooses": (packed_attention_by_document, None),
    "by document, cuDNN": (packed_attention_by_document, SDPBackend.CUDNN_ATTENTION),
    "by document, flash": (packed_attention_by_document, SDPBackend.FLASH_ATTENTION),
}


def run(day: Day) -> None:
    """Time new lengths, then compare equal documents, then unequal ones, of whose lengths each needs a plan."""
    torch.manual_seed(0)
    day.attempt("new lengths", partial(new_lengths, day), least=3.0)
    for heads in HEADS:
        day.attempt(f"equal, {heads}", partial(compared, day, heads, _equal(day)), least=4.0)
    for heads in HEADS[:2]:
        day.attempt(f"unequal, {heads}", partial(compared, day, heads, _unequal(day)), least=4.0)


def _equal(day: Day) -> dict[str, list[int]]:
    length = SMALL_LENGTH if day.small else LENGTH
    return {f"{number} equal": [length // number] * number for number in (EQUAL[:2] if day.small else EQUAL)}


def _unequal(day: Day) -> dict[str, list[int]]:
    length, found = SMALL_LENGTH if day.small else LENGTH, {}
    for name, shares in UNEQUAL.items():
        lengths = [int(length * share) for share in shares]
        found[name] = [*lengths[:-1], length - sum(lengths[:-1])]
    return found


def compared(day: Day, heads: Heads, splits: dict[str, list[int]]) -> Answer:
    """Return the milliseconds of forward and backward by split and form. A form that refuses says why."""
    q, k, v = _tensors(day, heads, sum(next(iter(splits.values()))))
    found: dict[str, Any] = {}
    for name, lengths in splits.items():
        if day.seconds_left < SECONDS_OF_A_SPLIT:
            found["left_out"] = [other for other in splits if other not in found]
            break
        ends = torch.tensor(lengths).cumsum(0).tolist()
        documents = PackedDocuments.of(AttentionMask.of_documents(ends, causal=heads.causal), day.place)
        found[name] = {form: _milliseconds(day, form, (q, k, v), documents) for form in FORMS}
    return Answer(None, found if day.on_gpu else {**found, "not_to_be_had": NO_GPU})


def _milliseconds(day: Day, form: str, tensors: Sequence[Tensor], documents: PackedDocuments) -> float | str:
    function, kernel = FORMS[form]
    attend = partial(function, *tensors, documents=documents)
    try:
        with _only(day, kernel):
            return 1e3 * median_seconds(day, both_ways(attend, tensors), 5)
    except RuntimeError as error:
        return str(error)[:120]


def _only(day: Day, kernel: SDPBackend | None) -> AbstractContextManager[None]:
    return sdpa_kernel(kernel) if kernel is not None and day.on_gpu else nullcontext()


def new_lengths(day: Day) -> Answer:
    """Return the host's milliseconds of the first and the second call of each new length, by kernel."""
    heads = Heads(2, 2, 16, False) if day.small else HEADS[0]
    kernels = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    found: dict[str, Any] = {}
    for name, kernel in kernels.items():
        first, second = [], []
        for number in range(2 if day.small else NEW_LENGTHS):
            tensors = _tensors(day, heads, 16 + number if day.small else 1000 + 37 * number)
            with _only(day, kernel):
                first.append(_host_milliseconds(day, tensors))
                second.append(_host_milliseconds(day, tensors))
        first, library = first[1:] or first, first[0]  # the very first call loads the library
        found[name] = {"library": library, "first": median(first), "slowest_first": max(first), "all_first": first}
        found[name]["second"] = median(second)
    return Answer(None, found if day.on_gpu else {**found, "not_to_be_had": NO_GPU})


def _host_milliseconds(day: Day, tensors: Sequence[Tensor]) -> float:
    """Return the time until the host has launched forward and backward on an idle device."""
    day.synchronize()
    began = time.perf_counter()
    q, k, v = tensors
    y = F.scaled_dot_product_attention(q, k, v)
    torch.autograd.grad(y, tensors, y.detach())
    return 1e3 * (time.perf_counter() - began)


def _tensors(day: Day, heads: Heads, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as the package's layers have them: positions first in memory."""
    made = (normal(day, 1, length, count, heads.size) for count in (heads.queries, heads.groups, heads.groups))
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in made)
    return q, k, v
