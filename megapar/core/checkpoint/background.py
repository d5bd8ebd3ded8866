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
    """A section that nobody watches."""
    return nullcontext()


def no_copy(error: Exception) -> CheckpointError:
    """Why a rank has nothing to write, for the others."""
    return CheckpointError(f"no copy of the state in host memory: {type(error).__name__}: {error}")


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
    """At most one save at a time. Host memory for the copy is taken at the first save and kept for the next ones.

    section: what the thread that saves is watched by: called with "save" and which one it is.
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
        """Copy what this rank may write of ``state``, then call ``write`` with the copies, in a thread.

        failed: is called there instead where they could not be made: other ranks wait for this one. detail: which save.
        Nothing in ``state`` may change until ``settle_copy`` has returned. ``join`` comes before the next ``begin``.
        """
        assert self._thread is None, "a save is still under way"
        start = time.perf_counter()
        problem = self._make_room(state)
        stream, behind = self._device.new_stream(), self._device.event()
        self._copied.clear()
        self._written = written = Written(0.0, 0.0)

        def run() -> None:
            try:
                with self._section("save", detail):
                    self._device.prepare_thread()
                    copies = problem or self._try_copy(state, stream, behind)
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
        """Host memory for the copies; why there is none."""
        try:
            for name, shard in state.items():
                if shard.primary and (name not in self._buffers or self._buffers[name].shape != shard.tensor.shape):
                    flat = self._device.pinned_zeros(shard.tensor.numel(), shard.tensor.dtype)
                    self._buffers[name] = flat.view(shard.tensor.shape)
        except Exception as error:  # MemoryError, RuntimeError or an accelerator's own, as the allocator has it
            self._buffers.clear()  # half of it is of use to nobody
            return error
        return None

    def _try_copy(self, state: State, stream: Any, behind: Any) -> dict[str, Shard] | Exception:
        try:
            copies = self._device.launch(lambda: self._copy(state), stream, behind)
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
