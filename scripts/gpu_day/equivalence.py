"""Rows of the equivalence table as one process on this device in bf16, compared with fp64 and with bf16 on a CPU.

The reference is one process in fp64 on a CPU; the other runs repeat its routing. The error of bf16 may be as large as
on a CPU (``tests/equivalence/compare.py``), with fused attention or with plain products: losses that balance experts
count each token's best ones by score, which are not repeated, so that rounding decides where scores nearly tie, and the
gradient of a router in a step has one of two errors, ten times apart. This compares the operators of the device, not
layouts, in whole models with all options of the rows. Rows with dropout are skipped, because devices generate different
random numbers.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from scripts.gpu_day.day import Answer, Day
from tests.equivalence.compare import excess, still
from tests.equivalence.run import Routing, Trace, trace
from tests.equivalence.table import ROWS, Row

# Flags of the CPU's bf16 runs; the second one runs only if the errors are larger than those of the first.
ROUNDINGS: dict[str, tuple[str, ...]] = {"fused attention": (), "plain attention": ("--no-use-flash-attn",)}
STEPS = 4  # without updates, so that all of them measure the rounding of the same model


def run(day: Day) -> None:
    """Compare one row per model and set of options."""
    for row in rows(day.small):
        day.attempt(row_name(row), partial(compared, day, row), least=5.0)


def rows(small: bool) -> list[Row]:
    """Return one row for every model and set of options."""
    first = {(row.model, row.options): row for row in ROWS if not any("dropout" in flag for flag in row.options)}
    found = list(first.values())
    return [next(row for row in found if row.model == model) for model in ("moe", "gpt", "ernie")] if small else found


def row_name(row: Row) -> str:
    """Return the model and options of a row, without its layout."""
    return " ".join((row.model, *row.options)).replace("--", "")


def compared(day: Day, row: Row) -> Answer:
    """Compare losses and gradients of steps without updates."""
    steps = 2 if day.small else STEPS
    flags = still(row.reference_flags())
    try:
        exact = traced("cpu", row.kind, (*flags, "--dtype", "fp64"), steps)
    except ModuleNotFoundError as error:
        return Answer(None, {"not_to_be_had": str(error)})
    got = traced(day.device, row.kind, (*flags, "--dtype", "bf16"), steps, exact.routing)
    wrong: dict[str, list[str]] = {}
    for name, more in ROUNDINGS.items():
        alone = traced("cpu", row.kind, (*flags, "--dtype", "bf16", *more), steps, exact.routing)
        wrong[name] = excess(got, alone, exact)
        if not wrong[name]:
            break
    apart = [abs(a / b - 1) for a, b in zip(got.losses, exact.losses, strict=True)]
    figures = {name: found[:5] for name, found in wrong.items()}
    return Answer(not all(wrong.values()), {"wrong": figures, "losses_apart": max(apart)})


def traced(device: str, kind: str, flags: tuple[str, ...], steps: int, replay: Routing | None = None) -> Trace:
    """Trace one process on a device, repeating the routing ``replay`` if given."""
    with tempfile.TemporaryDirectory() as folder:
        meet, backend = str(Path(folder) / "meet"), "gloo" if device == "cpu" else device
        found = trace(0, 1, meet, kind, (*flags, "--device", device), steps, replay, backend)
    assert found is not None
    return found
