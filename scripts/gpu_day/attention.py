"""Comparison of each candidate of the table of attention's kernels with today's choice: time, error, repeatability.

Whole samples are compared with FlashAttention-2 by name, because torch's choice may be the candidate itself. cuDNN is
compared also where it is today's choice.

A candidate is confirmed by ``standing`` of its row in ``megapar/core/device/attention/table.py``; the finding of each
case contains the line. Confirm a row if every case of it says so.

Shape letters: B batch, S sequence, N query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.accelerators import pick
from megapar.core.device.attention.documents import packed_attention_filled
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.table import (
    BLOCKS,
    CANDIDATE,
    CAUSAL,
    CUDNN,
    DOCUMENTS,
    FLASH3,
    FULL,
    LOWER_RIGHT,
    ROWS,
    WINDOW,
    AttentionCall,
    KernelRow,
    choose,
)
from megapar.core.device.base import Device
from megapar.core.device.kinds import device_class
from megapar.core.device.ops import OPS
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.operators import TOLERANCE, relative

DTYPE = torch.bfloat16
SIZES = (64, 128)  # features of a head
REPETITIONS = 5
# Form -> operator of the table; whole samples have one for each kernel.
_OPERATORS = {
    **{CAUSAL: "attention", FULL: "attention", LOWER_RIGHT: "attention_slice"},
    **{DOCUMENTS: "packed_attention", WINDOW: "packed_attention"},
}
_BASELINES = {**_OPERATORS, CAUSAL: "attention_flash", FULL: "attention_flash"}
_OF_KERNEL = {CUDNN: "attention_cudnn", FLASH3: "attention_flash"}


class Measured(NamedTuple):
    """Figures of one kernel.

    Attributes:
        milliseconds: Forward and backward.
        error: Largest relative error of the result and the gradients against fp64.
        repeats: Result and gradients of all repetitions are equal to the last bit.
    """

    milliseconds: float
    error: float
    repeats: bool


def run(day: Day) -> None:
    """Compare each candidate in each of its forms that an operator computes by itself."""
    torch.manual_seed(0)
    for number, row in enumerate(ROWS):
        if row.standing == CANDIDATE or row.kernel == CUDNN:
            for form in row.forms:
                for size in SIZES if form != BLOCKS else ():
                    work = partial(candidate, day, row, form, size)
                    day.attempt(f"row {number}, {row.kernel}: {form}, heads of {size}", work)
    day.attempt("documents, each by a call", partial(long_documents, day), least=10.0)


def long_documents(day: Day) -> Answer:
    """Time packed samples of long documents by one call and by a call each, with the first calls of new lengths."""
    step, least = (8, 16) if day.small else (device_class(day.device).document_step, 1024)
    forms = (OPS["packed_attention"][day.device], partial(packed_attention_filled, step=step))
    cases, total, right = {}, [0.0, 0.0], True
    for lengths in ((16, 16, 16, 16), (17, 21, 26), (19, 45), (64,), (33, 30), (18, 16, 29)):
        own = [length * least // 16 + (3 * length) % step for length in lengths]
        shapes = [(1, heads, sum(own), 128) for heads in (32, 8, 8)]
        tensors = [torch.randn(shape, device=day.place, dtype=DTYPE).requires_grad_() for shape in shapes]
        mask = DeviceMask.of(AttentionMask.of_documents(list(accumulate(own))), day.place)
        runs = [partial(_both_ways, form, tensors, {"mask": mask}) for form in forms]
        first, found = zip(*(_first(day, run) for run in runs), strict=True)
        steady = [day.seconds(run, 5) for run in runs]
        total = [sum(both) for both in zip(total, steady, strict=True)]
        right = right and max(relative(a, b.double()) for a, b in zip(*found, strict=True)) <= 2 * TOLERANCE[DTYPE]
        cases[" ".join(map(str, own))] = {"first": first, "steady": steady}
    figures: dict[str, Any] = {"cases": cases, "ratio": total[1] / total[0]}
    if right and figures["ratio"] < 1.0:
        figures["set"] = f"least_document: {least}, document_step: {step}"
    return Answer(right, figures)


def _first(day: Day, run: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    """Return the seconds and the result of a first call."""
    day.synchronize()
    began = time.perf_counter()
    found = run()
    day.synchronize()
    return time.perf_counter() - began, found


def candidate(day: Day, row: KernelRow, form: str, size: int) -> Answer:
    """Measure a candidate next to today's choice, or report why it does not run here."""
    device = pick(day.device)
    call = AttentionCall(form, size, size, str(DTYPE).removeprefix("torch."), device.capability or (0, 0))
    earlier = "" if choose(row.kernel, call) is row else "an earlier row of the kernel takes the call"
    if lacks := row.lacks(call) or device.attention_lacks(row.kernel) or earlier:
        return Answer(None, {"not_to_be_had": lacks})
    today = OPS[_BASELINES[form]][day.device]
    name = _OF_KERNEL[row.kernel] if form in (CAUSAL, FULL) else _OPERATORS[form]
    with_today = measured(day, form, size, today)
    if row.kernel == FLASH3:
        device.activate_flash3()
    try:
        found = measured(day, form, size, OPS[name][day.device])
    finally:
        if row.kernel == FLASH3:
            torch.nn.attention.restore_flash_attention_impl()
    return judged(with_today, found, device)


def judged(today: Measured, found: Measured, device: Device) -> Answer:
    """Return the figures of both kernels, and the entries of the row that confirm it if it is faster and right."""
    right = found.error <= TOLERANCE[DTYPE]
    figures: dict[str, Any] = {"today": today._asdict(), "candidate": found._asdict()}
    if right and found.milliseconds < today.milliseconds:
        figures["confirms"] = f'standing="{time.strftime("%Y-%m-%d")}, {device.name}"'
        if found.repeats:
            figures["repeats"] = f"equal in {REPETITIONS} runs; repeats=True also needs torch's word for it"
    return Answer(right, figures)


def measured(day: Day, form: str, size: int, kernel: Callable[..., Tensor]) -> Measured:
    """Measure time at a real length, error and repetitions at one whose reference fits."""
    tensors, more = _drawn(day, form, size, 64 if day.small else 8192)
    milliseconds = 1e3 * day.seconds(partial(_both_ways, kernel, tensors, more), 5)
    tensors, more = _drawn(day, form, size, 32 if day.small else 1024)
    runs = [_both_ways(kernel, tensors, more) for _ in range(REPETITIONS)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = _both_ways(OPS[_OPERATORS[form]]["reference"], exact, more)
    return Measured(
        milliseconds,
        max(relative(a, b) for a, b in zip(runs[0], want, strict=True)),
        all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True)),
    )


def _drawn(day: Day, form: str, size: int, length: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Return q [1, N, S, D], k and v [1, G, S, D], and the keyword arguments of a form."""
    heads, groups = (4, 2) if day.small else (32, 8)
    queries = length // 2 if form == LOWER_RIGHT else length
    shapes = ((1, heads, queries, size), (1, groups, length, size), (1, groups, length, size))
    tensors = [torch.randn(shape, device=day.place, dtype=DTYPE).requires_grad_() for shape in shapes]
    if form == DOCUMENTS:
        mask = AttentionMask.of_documents([length // 4 + 3, length // 2, length])
        return tensors, {"mask": DeviceMask.of(mask, day.place)}
    if form == WINDOW:
        return tensors, {"mask": DeviceMask(AttentionMask(1, length, causal=True, window=length // 8))}
    return tensors, {} if form == LOWER_RIGHT else {"form": form}


def _both_ways(kernel: Callable[..., Tensor], tensors: list[Tensor], more: dict[str, Any]) -> list[Tensor]:
    """Return the result and the gradients of the sum of its squares."""
    y = kernel(*tensors, **more)
    return [y, *torch.autograd.grad(y, tensors, 2 * y.detach())]
