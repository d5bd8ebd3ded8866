"""Host waits in a step, from torch's detector, with the line of megapar that causes them.

The detector (``torch.cuda.set_sync_debug_mode``) warns at every call that synchronizes implicitly: copies from pageable
memory, ``.item()``, indexing with a list. It does not report explicit waits for events. A wait in a C++ backward is
reported at the line that called the backward.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import megapar
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.trainers import flags, kind, parsed, trainer

RUNS = {
    "dense": ("dense", "", 1),
    "ernie": ("ernie", "", 1),
    "dropless": ("moe", "--moe-model-type megatron_moe", 1),
    "capacity": ("moe", "--moe-model-type deepspeed_moe", 1),
    "documents": ("moe", "--moe-model-type megatron_moe --reset-attention-mask --reset-position-ids", 1),
    "recompute": ("moe", "--moe-model-type megatron_moe --recompute-interval 1", 1),
    "2 slices": ("moe", "--moe-model-type megatron_moe", 2),
    "2 slices, capacity": ("moe", "--moe-model-type deepspeed_moe", 2),
    "offloaded optimizer": ("dense", "--optimizer-offload", 1),
    "2 micro-batches": ("moe", "--moe-model-type megatron_moe --gradient-merge-acc-step 2", 1),
}
# (file, function) -> reason why it may wait. One process receives no counts from other ranks and reads its gradient
# norm a step late, so that no part of a step requires a host wait.
ALLOWED: dict[tuple[str, str], str] = {}
WARNED = "called a synchronizing"  # the detector also says once that it is a prototype
PACKAGE = Path(megapar.__file__).parent


def run(day: Day) -> None:
    """Check the detector, then run two steps and one with the detector for every configuration."""
    day.attempt("the detector", partial(_detector_works, day))
    for name, (model, more, slices) in RUNS.items():
        day.attempt(name, partial(watched, day, model, more, slices), least=3.0)


def _detector_works(day: Day) -> Answer:
    """Wait on purpose, once; the detector must report it."""
    x = torch.ones(1, device=day.place)
    with seen() as waits, detector(on_gpu=day.on_gpu):
        x.item()
    if not day.on_gpu:
        return Answer(None, {"not_to_be_had": "a CPU has no detector"})
    return Answer(sum(waits.values()) == 1, {"waits": dict(waits)})


def watched(day: Day, model: str, more: str, slices: int) -> Answer:
    """Count the waits of a step by the line that causes them."""
    config = parsed(flags(day, model, more), model)
    with trainer(config, day.device, slices) as made:
        for _ in range(2):
            made.step()
        day.synchronize()
        with seen() as waits, detector(on_gpu=day.on_gpu):
            made.step()
        day.synchronize()
    if not day.on_gpu:
        return Answer(None, {"script": kind(model), "not_to_be_had": "a CPU has no detector: the step ran"})
    unwanted = {place: count for place, count in waits.items() if place_of(place) not in ALLOWED}
    return Answer(not unwanted, {"waits": dict(waits), "unwanted": unwanted})


@contextmanager
def detector(*, on_gpu: bool) -> Iterator[None]:
    """Make torch warn at every synchronizing call."""
    if not on_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def seen(but: str = "") -> Iterator[Counter[str]]:
    """Count the detector's warnings by the innermost line of megapar: "file:line function".

    Those with a file on the stack whose path ends with ``but`` are not counted.
    """
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if WARNED not in str(message):
            return
        if not but or not any(frame.filename.endswith(but) for frame in traceback.extract_stack()):
            found[line_of_megapar()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield found


def line_of_megapar() -> str:
    """Return the innermost line of megapar on the stack."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return f"megapar/{path.relative_to(PACKAGE)}:{frame.lineno} {frame.name}"
    return "somewhere else"


def place_of(where: str) -> tuple[str, str]:
    """Return (file, function), because line numbers change."""
    path, _, function = where.partition(" ")
    return path.partition(":")[0], function
