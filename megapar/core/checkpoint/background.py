"""Saving while training goes on: a copy of the state, taken and written by a thread.

    step i      | begin       forward, backward of step i + 1 | settle_copy | update ...
    thread      |   copy to host memory ......................|..| hash, write, fsync, rename

What is saved changes in the update only, so that the copy is taken under the forward and backward that follow, and the
step waits for nothing but what is left of it when the update is due. Of state in host memory that a device
writes (offloaded moments) the caller waits for the device first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megapar.core.checkpoint.shard import Shard
from megapar.core.device.base import Device

State = Mapping[str, Shard]


@dataclass
class Written:
    """How a save went. stall_seconds: what training waited. total_seconds: until it was on disk, or failed.

    told: whether people have read of it.
    """

    stall_seconds: float
    total_seconds: float
    error: BaseException | None = None
    told: bool = False


class Background:
    """At most one save at a time. Host memory for the copy is taken at the first save and kept for the next ones."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._written = Written(0.0, 0.0)

    def begin(self, state: State, write: Callable[[State], None]) -> None:
        """Copy what this rank may write of ``state``, then call ``write`` with the copies, in a thread.

        Nothing in ``state`` may change until ``settle_copy`` has returned. ``join`` comes before the next ``begin``.
        """
        assert self._thread is None, "a save is still under way"
        start = time.perf_counter()
        for name, shard in state.items():
            if shard.primary and (name not in self._buffers or self._buffers[name].shape != shard.tensor.shape):
                flat = self._device.pinned_zeros(shard.tensor.numel(), shard.tensor.dtype)
                self._buffers[name] = flat.view(shard.tensor.shape)
        stream, behind = self._device.new_stream(), self._device.event()
        self._copied.clear()
        self._written = written = Written(0.0, 0.0)

        def run() -> None:
            try:
                self._device.prepare_thread()
                copies = self._device.launch(lambda: self._copy(state), stream, behind)
                self._device.after(stream)
                self._copied.set()
                write(copies)
            except BaseException as error:
                written.error = error
            finally:
                self._copied.set()
                written.total_seconds = time.perf_counter() - start

        self._thread = threading.Thread(target=run, name="megapar-save", daemon=True)
        self._thread.start()
        written.stall_seconds += time.perf_counter() - start

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
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def written(self) -> Written:
        """How the newest save went so far."""
        return self._written

    def settle_copy(self) -> None:
        """Wait until the copy is taken, which the save counts as its stall."""
        if self._thread is not None and not self._copied.is_set():
            start = time.perf_counter()
            self._copied.wait()
            self._written.stall_seconds += time.perf_counter() - start

    def join(self) -> Written | None:
        """Wait for the save under way, which counts as its stall; how it went, or None where there was none."""
        if self._thread is None:
            return None
        start = time.perf_counter()
        was_busy = self._thread.is_alive()
        self._thread.join()
        self._thread = None
        if was_busy:
            self._written.stall_seconds += time.perf_counter() - start
        return self._written
