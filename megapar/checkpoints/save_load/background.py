"""Background saves: a thread copies the state and writes it while training continues.

    step i      | begin       forward, backward of step i + 1 | wait_for_copy | update ...
    thread      |   copy to host memory ......................|..| hash, write, fsync, rename

The saved state changes only in the optimizer update. The copy therefore overlaps with the next forward and backward,
and the step waits only for the rest of it before the update. If a device writes to state in host memory (offloaded
moments), the caller first waits for the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megapar.checkpoints.format.shards import Shard
from megapar.core.device.base import Device
from megapar.core.units import clock_text
from megapar.errors import CheckpointError

State = Mapping[str, Shard]
Write = Callable[[State | CheckpointError], None]
"""Writes a state, or makes the save fail on all ranks because this rank has none."""
Section = Callable[[str, str], AbstractContextManager[None]]


def unwatched(name: str, detail: str) -> AbstractContextManager[None]:
    """Return a section without a watchdog."""
    return nullcontext()


@dataclass
class Written:
    """The result of a save.

    Attributes:
        stall_seconds: Time that training waited for it.
        total_seconds: Time until it was on disk or had failed.
        reported: The result is in the log.
    """

    stall_seconds: float
    total_seconds: float
    error: BaseException | None = None
    reported: bool = False


class Background:
    """Runs at most one save at a time. Host memory for the copy is allocated at the first save and then reused.

    ``section`` makes the watched section of the saving thread from "save" and the name of the checkpoint. ``written``
    is the result of the newest save, so far.
    """

    def __init__(self, device: Device, section: Section = unwatched) -> None:
        self._device = device
        self._section = section
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self.written = Written(0.0, 0.0)

    def begin(self, state: State, write: Write, detail: str = "") -> None:
        """Start a thread that copies this rank's part of ``state`` and calls ``write`` with the copies.

        If the copy fails, ``write`` gets the error, because the other ranks wait for this one. ``state`` must not
        change before ``wait_for_copy`` has returned. Call ``join`` before the next ``begin``. ``detail`` is its name.
        """
        assert self._thread is None, "a save is still running"
        start = time.perf_counter()
        problem = self._make_room(state)
        stream, event = self._device.new_stream(), self._device.event()
        self._copied.clear()
        self.written = written = Written(0.0, 0.0)

        def run() -> None:
            try:
                with self._section("save", detail):
                    self._device.prepare_thread()
                    copies = problem or self._try_copy(state, stream, event)
                    self._copied.set()
                    if isinstance(copies, Exception):
                        reason = f"{type(copies).__name__}: {copies}"
                        copies = CheckpointError(f"no copy of the state in host memory: {reason}")
                    write(copies)
            except BaseException as error:
                written.error = error
            finally:
                self._copied.set()
                written.total_seconds = time.perf_counter() - start

        self._thread = threading.Thread(target=run, name="megapar-save", daemon=True)
        self._thread.start()
        written.stall_seconds += time.perf_counter() - start

    def _make_room(self, state: State) -> Exception | None:
        """Allocate host memory for the copies. Return the error if that failed."""
        try:
            for name, shard in state.items():
                if shard.primary and (name not in self._buffers or self._buffers[name].shape != shard.tensor.shape):
                    flat = self._device.pinned_zeros(shard.tensor.numel(), shard.tensor.dtype)
                    self._buffers[name] = flat.view(shard.tensor.shape)
        except Exception as error:  # MemoryError, RuntimeError or an accelerator's error, depending on the allocator
            self._buffers.clear()  # an incomplete set is useless
            return error
        return None

    def _try_copy(self, state: State, stream: Any, event: Any) -> dict[str, Shard] | Exception:
        try:
            copies = self._device.launch(lambda: self._copy(state), stream, event)
            self._device.after(stream)
            return copies
        except Exception as error:
            return error

    def _copy(self, state: State) -> dict[str, Shard]:
        copies = {}
        with torch.no_grad():
            for name, shard in state.items():
                if shard.primary:
                    self._buffers[name].copy_(shard.tensor, non_blocking=True)
                    copies[name] = replace(shard, tensor=self._buffers[name])
                else:
                    copies[name] = shard
        return copies

    @property
    def busy(self) -> bool:
        """True while a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait_for_copy(self) -> None:
        """Wait until the copy is complete. The wait counts as the stall of the save."""
        if self._thread is not None and not self._copied.is_set():
            start = time.perf_counter()
            self._copied.wait()
            self.written.stall_seconds += time.perf_counter() - start

    def join(self) -> Written | None:
        """Wait for the running save; return its result, or None if there is none. The wait counts as its stall."""
        if self._thread is None:
            return None
        start = time.perf_counter()
        was_busy = self._thread.is_alive()
        self._thread.join()
        self._thread = None
        if was_busy:
            self.written.stall_seconds += time.perf_counter() - start
        return self.written


class SaveFailures:
    """Counts failed saves, ``in_a_row`` since the newest one written, and words messages. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._newest = ""
        self.in_a_row = 0

    def saved(self, name: str) -> str:
        """Reset the count after a save. Returns a message about the failed saves before it, or ""."""
        missed, self.in_a_row = self.in_a_row, 0
        self._since, self._newest = self._clock(), name
        return f"checkpoints are written again: {missed} before {name} were not" if missed > 1 else ""

    def failed(self, name: str, error: BaseException) -> str:
        """Count a failed save and return the message for the log."""
        self.in_a_row += 1
        if self.in_a_row == 1:
            return f"WARNING: {name} was not saved: {error}"
        newest = f"the newest one is {self._newest}" if self._newest else "this start has not saved any"
        level = "WARNING" if self.in_a_row == 2 else "ERROR"
        return (
            f"{level}: {name} was not saved, the {_nth(self.in_a_row)} checkpoint in a row: {error}. For "
            f"{clock_text(self._clock() - self._since)} no checkpoint has been written; {newest}, and all training "
            "since then is lost if the run ends now"
        )


def _nth(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
