"""``--profile START:END``: torch's profiler over a few steps, written for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megapar.core.device.base import Device

NAME = "trace.json"


class Profile:
    """Records the steps START to END, both included, of one rank.

    folder: gets ``trace.json``; None: another rank records. settle: waits for what is in flight between steps, on all
    ranks alike: a collective that ends after the profiler was switched on or off would be reported to one that is not
    there, which crashes the process (torch 2.13).
    """

    def __init__(self, steps: str, folder: Path | None, device: Device, settle: Callable[[], None]) -> None:
        self._settle = settle
        first, _, last = steps.partition(":")
        self._first, self._last, self._folder = int(first), int(last), folder
        self._activities = device.profiled
        self._profiler: Any = None

    def before_step(self, iteration: int) -> None:
        """Step number ``iteration`` is about to begin."""
        if iteration == self._first:
            self._settle()
            if self._folder is None:
                return
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()

    def after_step(self, iteration: int) -> None:
        """It has ended."""
        if iteration == self._last:
            self._settle()
            self.close()

    def close(self) -> None:
        """Write what was recorded, also where the run ends early."""
        if self._profiler is not None and self._folder is not None:
            self._profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / NAME))
            self._profiler = None
