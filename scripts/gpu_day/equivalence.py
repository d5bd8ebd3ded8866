"""Rows of the equivalence table as one process on this device in bf16, against fp64 and against a CPU's bf16.

The reference is one process in fp64 on a CPU, whose routing the others repeat; what bf16 may cost is what it costs one
process on a CPU (``tests/equivalence/compare.py``). Here no layout is compared but the device's operators, in whole
models with every option that a row has. Dropout is left out: devices draw otherwise.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

from megapar.core.device.pick import pick
from scripts.gpu_day.day import Answer, Day
from tests.equivalence import run as runs
from tests.equivalence.compare import excess
from tests.equivalence.run import Routing, Trace
from tests.equivalence.table import ROWS, Row

STEPS = 4  # that change nothing, so that all of them measure the rounding of one model
STILL = ("--lr", "1e-30", "--weight-decay", "0")


def run(day: Day) -> None:
    """Rows with different options first, then the same options at other batches."""
    for row in rows(day.small):
        day.attempt(row_name(row), partial(compared, day, row), least=5.0)


def rows(small: bool) -> list[Row]:
    """One for every model and set of options."""
    first = {(row.model, row.options): row for row in ROWS if not any("dropout" in flag for flag in row.options)}
    found = list(first.values())
    return [next(row for row in found if row.model == model) for model in ("moe", "gpt", "ernie")] if small else found


def row_name(row: Row) -> str:
    """Without its layout: what one process is told."""
    return " ".join((row.model, *row.options)).replace("--", "")


def compared(day: Day, row: Row) -> Answer:
    """Gradients of still steps."""
    steps = 2 if day.small else STEPS
    flags = still(row.reference_flags())
    exact = traced("cpu", row.kind, (*flags, "--dtype", "fp64"), steps)
    alone = traced("cpu", row.kind, (*flags, "--dtype", "bf16"), steps, exact.routing)
    got = traced(day.device, row.kind, (*flags, "--dtype", "bf16"), steps, exact.routing)
    wrong = excess(got, alone, exact)
    apart = [abs(a / b - 1) for a, b in zip(got.losses, exact.losses, strict=True)]
    return Answer(not wrong, {"wrong": wrong[:5], "losses_apart": max(apart)})


def traced(device: str, kind: str, flags: tuple[str, ...], steps: int, replay: Routing | None = None) -> Trace:
    """One process on a device; the choices it repeats come along."""
    where = pick(device)
    if replay is not None:
        replay = {key: experts.to(where.torch_device) for key, experts in replay.items()}
    with tempfile.TemporaryDirectory() as folder, patch.object(runs, "_device", lambda backend: where):
        found = runs.trace(0, 1, str(Path(folder) / "meet"), kind, (*flags, "--device", device), steps, replay)
    assert found is not None
    if replay is None:
        found.routing = {key: experts.cpu() for key, experts in found.routing.items()}
    return found


def still(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The same run without a learning rate."""
    start = flags.index("--lr")
    return (*flags[:start], *flags[start + 2 :], *STILL)
