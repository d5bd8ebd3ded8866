"""Context of a part of the GPU day: device, time limit, findings, and measurements."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.gpu_day.clocks import sampled
from scripts.gpu_day.findings import Findings

LINES_OF_A_TRACEBACK = 30
MODELS = ("dense", "moe", "ernie", "dense8b")


class Answer(NamedTuple):
    """Result of an attempt.

    Attributes:
        ok: True or False; None for figures without a criterion, and for features that are not available here.
        figures: Measurements by name.
    """

    ok: bool | None
    figures: dict[str, Any]


@dataclass
class Day:
    """Context of one part.

    Attributes:
        part: Name of the part.
        device: "cuda" or "cpu".
        small: Use sizes for a test.
        out: Folder of the results.
        ends: Time at which the part should be done, on ``time.monotonic``.
        findings: File of the findings.
        known: Attempts that an earlier call completed.
        missing: Number of attempts that were skipped for lack of time.
        models: Models of the races.
    """

    part: str
    device: str
    small: bool
    out: Path
    ends: float
    findings: Findings
    known: frozenset[str] = frozenset()
    missing: int = 0
    models: tuple[str, ...] = MODELS

    @property
    def seconds_left(self) -> float:
        """Seconds until the part should end."""
        return self.ends - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """True if the device has streams, kernels and a detector of waits."""
        return self.device == "cuda"

    @property
    def place(self) -> torch.device:
        """Device of tensors."""
        return torch.device(self.device)

    def attempt(self, what: str, find: Callable[[], Answer], least: float = 0.0) -> None:
        """Make one attempt, unless an earlier call has completed it. An error becomes a finding.

        On a GPU the finding also has its clocks during the attempt, which compare figures of different days.

        Args:
            what: Name of the attempt.
            find: Returns its result.
            least: Minimum of remaining seconds; with fewer, the attempt is skipped.
        """
        if what in self.known:
            return
        if self.seconds_left <= least:
            self.missing += 1
            self.findings.record(self.part, what, None, left_out=f"{self.seconds_left:.0f} s were left")
            return
        began = time.monotonic()
        try:
            with sampled(self.on_gpu) as clocks:
                ok, figures = find()
        except Exception as error:
            lines = "".join(traceback.format_exception(error)).splitlines()[-LINES_OF_A_TRACEBACK:]
            text = f"{type(error).__name__}: {str(error)[:500]}"
            self.findings.record(self.part, what, False, error=text, traceback="\n".join(lines))
            return
        about = {"clocks": clocks.summary()} if clocks.samples else {}
        self.findings.record(self.part, what, ok, **figures, **about, took=time.monotonic() - began)

    def synchronize(self) -> None:
        """Wait until the device has completed all work."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int = 10) -> float:
        """Return the mean seconds per call of ``work``, over ``times`` calls after warmup; fewer if a call is slow."""
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
