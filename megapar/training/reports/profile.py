"""``--profile START:END``: torch's profiler over a few steps, written for Perfetto and chrome://tracing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megapar.core.device.base import Device

NAME = "trace.json"


class Profile:
    """A callback that profiles the steps START to END, both included, of one rank.

    Args:
        steps: "START:END".
        folder: Folder for ``trace.json``. None if another rank records.
        device: The device to profile.
        settle: Waits for collectives in flight between steps, on all ranks. A collective that ends after the profiler
            was started or stopped is reported to a missing profiler, which crashes the process (torch 2.13).
    """

    def __init__(self, steps: str, folder: Path | None, device: Device, settle: Callable[[], None]) -> None:
        self._settle = settle
        first, _, last = steps.partition(":")
        self._first, self._last, self._folder = int(first), int(last), folder
        self._activities = device.profiled
        self._profiler: Any = None

    def before_step(self, iteration: int) -> None:
        """Start the profiler before the first step."""
        if iteration == self._first:
            self._settle()
            if self._folder is None:
                return
            self._profiler = torch.profiler.profile(activities=self._activities)
            self._profiler.start()

    def after_step(self, iteration: int) -> None:
        """Write the trace after the last step."""
        if iteration == self._last:
            self._settle()
            self.close()

    def close(self) -> None:
        """Write the recorded steps, also if the run ends early. Warns if that fails: training goes on."""
        profiler, self._profiler = self._profiler, None
        if profiler is None or self._folder is None:
            return
        profiler.stop()
        path = self._folder / NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:  # of the folder; torch reports the file itself, without an error
            message = f"--profile: {path} cannot be written: {error}. Training continues"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
