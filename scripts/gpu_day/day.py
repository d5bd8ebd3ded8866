"""What a part of the GPU day knows and may do."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.gpu_day.findings import Findings

LINES_OF_A_TRACEBACK = 30
MODELS = ("dense", "moe", "ernie")


class Answer(NamedTuple):
    """What an attempt found. ok: None for figures without a right and a wrong, and for what cannot be had here."""

    ok: bool | None
    figures: dict[str, Any]


@dataclass
class Day:
    """One part's day. device: cuda or cpu. small: sizes for a test. ends: on time.monotonic, when it should be done.

    told: what an earlier call has found and need not find again. missing: what there was no time for. models: of the
    races.
    """

    part: str
    device: str
    small: bool
    out: Path
    ends: float
    findings: Findings
    told: frozenset[str] = frozenset()
    missing: int = 0
    models: tuple[str, ...] = MODELS

    @property
    def seconds_left(self) -> float:
        """Until the part should end."""
        return self.ends - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams, kernels and a detector of waits."""
        return self.device == "cuda"

    @property
    def place(self) -> torch.device:
        """Where tensors live."""
        return torch.device(self.device)

    def attempt(self, what: str, find: Callable[[], Answer], least: float = 0.0) -> None:
        """Find one thing, unless an earlier call has; an error is a finding, and the rest goes on.

        least: seconds that it may take, below which it is left out.
        """
        if what in self.told:
            return
        if self.seconds_left <= least:
            self.missing += 1
            self.findings.tell(self.part, what, None, left_out=f"{self.seconds_left:.0f} s were left")
            return
        began = time.monotonic()
        try:
            ok, figures = find()
        except Exception as error:
            lines = "".join(traceback.format_exception(error)).splitlines()[-LINES_OF_A_TRACEBACK:]
            text = f"{type(error).__name__}: {str(error)[:500]}"
            self.findings.tell(self.part, what, False, error=text, traceback="\n".join(lines))
            return
        self.findings.tell(self.part, what, ok, **figures, took=time.monotonic() - began)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int = 10) -> float:
        """Of one call of ``work``, the mean of ``times`` behind three that warm up; of few where one takes long."""
        for _ in range(1 if self.small else 3):
            work()
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        once = time.perf_counter() - began
        times = max(1, min(times, int(2.0 / max(once, 1e-9))))
        began = time.perf_counter()
        for _ in range(times):
            work()
        self.synchronize()
        return (time.perf_counter() - began) / times
