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

from megapar.core.checkpoint.shard import Shard
from megapar.core.device.base import Device
from megapar.errors import CheckpointError

State = Mapping[str, Shard]
Section = Callable[[str, str], AbstractContextManager[None]]


def unwatched(name: str, detail: str) -> AbstractContextManager[None]:
    """Return a section without a watchdog."""
    return nullcontext()


def no_copy(error: Exception) -> CheckpointError:
    """Return the error with which a save fails on all ranks because this rank has nothing to write."""
    return CheckpointError(f"no copy of the state in host memory: {type(error).__name__}: {error}")


@dataclass
class Written:
    """The result of a save.

    Attributes:
        stall_seconds: Time that training waited for it.
        total_seconds: Time until it was on disk or had failed.
        error: The exception that ended it, if any.
        reported: The result is in the log.
    """

    stall_seconds: float
    total_seconds: float
    error: BaseException | None = None
    reported: bool = False


class Background:
    """Runs at most one save at a time. Host memory for the copy is allocated at the first save and then reused.

    Args:
        section: Makes the watched section of the saving thread from "save" and the name of the checkpoint.
    """

    def __init__(self, device: Device, section: Section = unwatched) -> None:
        self._device = device
        self._section = section
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._written = Written(0.0, 0.0)

    def begin(
        self,
        state: State,
        write: Callable[[State], None],
        failed: Callable[[Exception], None] | None = None,
        detail: str = "",
    ) -> None:
        """Start a thread that copies this rank's part of ``state`` and calls ``write`` with the copies.

        ``state`` must not change before ``wait_for_copy`` has returned. Call ``join`` before the next ``begin``.

        Args:
            failed: Called instead of ``write`` if the copy failed, because the other ranks wait for this one.
            detail: The name of the checkpoint.
        """
        assert self._thread is None, "a save is still running"
        start = time.perf_counter()
        problem = self._make_room(state)
        stream, event = self._device.new_stream(), self._device.event()
        self._copied.clear()
        self._written = written = Written(0.0, 0.0)

        def run() -> None:
            try:
                with self._section("save", detail):
                    self._device.prepare_thread()
                    copies = problem or self._try_copy(state, stream, event)
                    self._copied.set()
                    if not isinstance(copies, Exception):
                        write(copies)
                    elif failed is not None:
                        failed(copies)
                    else:
                        raise copies
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
        except Exception as error:
            return error
        return copies

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

    @property
    def written(self) -> Written:
        """The result of the newest save, so far."""
        return self._written

    def wait_for_copy(self) -> None:
        """Wait until the copy is complete. The wait counts as the stall of the save."""
        if self._thread is not None and not self._copied.is_set():
            start = time.perf_counter()
            self._copied.wait()
            self._written.stall_seconds += time.perf_counter() - start

    def join(self) -> Written | None:
        """Wait for the running save; return its result, or None if there is none. The wait counts as its stall."""
        if self._thread is None:
            return None
        start = time.perf_counter()
        was_busy = self._thread.is_alive()
        self._thread.join()
        self._thread = None
        if was_busy:
            self._written.stall_seconds += time.perf_counter() - start
        return self._written
