"""Context of a part of the GPU day: device, time limit, measurements, and the file of its findings."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.gpu_day.clocks import sampled

LINES_OF_A_TRACEBACK = 30
PART = "the part"  # the last finding of a part, about the part itself
MODELS = ("dense", "moe", "ernie", "dense8b")


@dataclass(frozen=True)
class Findings:
    """Append-only file of findings.

    A line contains part, what (unique in its part), ok (false: wrong; null: a figure, or not available here) and
    figures.

    Attributes:
        facts: Device, size and commit, added to every line.
    """

    path: Path
    facts: Mapping[str, Any]

    def record(self, part: str, what: str, ok: bool | None, **figures: Any) -> None:
        """Append a line, which is in the file when this returns."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = {"part": part, "what": what, "ok": ok, "date": now, **self.facts, **figures}
        text = (json.dumps(_plain(line)) + "\n").encode()
        place = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # One call: lines of other processes do not interleave, and the line survives this process.
            os.write(place, text)
        finally:
            os.close(place)
        shown = {name: value for name, value in figures.items() if name != "traceback"}
        print(f"{_WORDS[ok]} {part}: {what} {json.dumps(_plain(shown))[:300]}", flush=True)

    def read(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return (part, what) -> its last line with this device, size and commit."""
        found = {}
        if self.path.exists():
            for text in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # truncated by a crash
                if all(line.get(name) == value for name, value in self.facts.items()):
                    found[line["part"], line["what"]] = line
        return found


_WORDS = {True: "ok   ", False: "WRONG", None: "     "}


def _plain(value: Any) -> Any:
    """Convert a value for JSON, which does not support infinities and NaN."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


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
        device: "cuda" or "cpu".
        small: Use sizes for a test.
        out: Folder of the results.
        ends: Time at which the part should be done, on ``time.monotonic``.
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

    def figures(self, figures: dict[str, Any], lacks: str) -> Answer:
        """Return figures without a criterion; those of a CPU with what it lacks."""
        return Answer(None, figures if self.on_gpu else {**figures, "not_to_be_had": lacks})

    def operator(self, name: str) -> Callable[..., Any]:
        """Return the device's entry of the operator table, or the reference."""
        from megapar.core.device.ops import OPS  # not in the process that forks the parts

        return OPS[name].get(self.device, OPS[name]["reference"])

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
