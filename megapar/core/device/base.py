"""Differences between devices. Everything that torch handles the same for all of them is left to torch."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from megapar.core.device.grouped import ALIGNMENT_BYTES, GROUPED_DTYPES

# torch.Stream and torch.Event if the device has streams, else NoStream and NoEvent.
Stream = Any
Event = Any

# Settings of glibc's allocator, from malloc.h, and the variables by which a user makes them.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_USER_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

T = TypeVar("T")


class MemoryPressure(NamedTuple):
    """Statistics of torch's caching allocator.

    Attributes:
        held_bytes: Bytes reserved from the device and not allocated.
        retries: Number of allocations that first had to release all cached memory, each a wait for the device.
    """

    held_bytes: int
    retries: int
    allocated_bytes: int


class NoEvent:
    """Event of a synchronous device: all work before it is done."""

    def synchronize(self) -> None: ...


class NoStream:
    """Stream of a synchronous device: enqueued work is done at once, and there is nothing to wait for."""

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self) -> NoEvent:
        """Return an event after all work so far."""
        return NoEvent()

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Device:
    """The CPU, and the base class of accelerators, which override the differences.

    Attributes:
        backend: Backend for ``init_process_group``.
        queue_backend: Backend of groups that only send tensors of the device; None for that of all groups.
        is_async: The host enqueues work without waiting for it. Waits of the host are then deferred by one slice, so
            that the device always has queued work. On a synchronous device this would only delay the launch.
        skips_updates: The kernel of the optimizer can skip an update by a value on the device, found_inf.
        scales_gradients: The kernel of the optimizer can divide fp32 gradients by a value on the device, grad_scale. On
            a CPU this would divide where clipping multiplies, and save no launch.
        repeatable: Environment variables that make its libraries sum in a fixed order, read at their first use.
    """

    type = "cpu"
    backend = "gloo"
    queue_backend: str | None = None
    is_async = False
    skips_updates = True
    scales_gradients = False
    repeatable: ClassVar[Mapping[str, str]] = {}

    def __init__(self, local_rank: int = 0) -> None:
        self.local_rank = local_rank
        self.torch_device = torch.device("cpu")

    @property
    def name(self) -> str:
        """Name for log lines: the kind of device and its number of threads or its model."""
        return f"cpu ({torch.get_num_threads()} threads)"

    @property
    def device_id(self) -> torch.device | None:
        """Argument ``device_id`` of ``init_process_group`` for eager communicators; None on a CPU."""
        return None

    def group_options(self, names: Collection[str], timeout: timedelta, *, queue: bool) -> Any:
        """Return ``pg_options`` of a group of the axes ``names``, or of a pipeline's ``queue``; None: defaults."""
        return None

    @property
    def default_dtype(self) -> torch.dtype:
        """Compute dtype of --dtype auto."""
        return torch.float32

    def prepare_process(self) -> None:
        """Apply the settings of the whole process for training on this device."""
        keep_freed_memory()

    def prepare_thread(self) -> None:
        """Select this device in a new thread, whose current device would otherwise be the first of the machine."""

    def repeat_results(self) -> None:
        """Use only deterministic kernels and reductions between ranks, whose results repeat to the last bit.

        Call it before the first matrix product and the first process group. Variables that are set already are kept.
        """
        for name, value in self.repeatable.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of an NVIDIA GPU, (major, minor); None for other devices."""
        return None

    def attention_lacks(self, kernel: str) -> str:
        """Return the reason why a kernel of ``attention.table`` is not installed here, or "" if it is."""
        return f"{kernel} is a kernel for NVIDIA GPUs, and the device is {self.name}"

    def activate_flash3(self) -> None:
        """Let FlashAttention-3 compute what torch's FlashAttention computes otherwise, in this whole process."""
        raise NotImplementedError(f"{self.name} has no FlashAttention-3; see attention_lacks")

    def compiler_lacks(self) -> str:
        """Return the reason why torch.compile cannot generate code for this device, or "" if it can."""
        if shutil.which(os.environ.get("CXX", "")) or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            return ""
        return "this machine has no C++ compiler (g++, clang++, or the one that CXX names)"

    def fp8_lacks(self, recipe: str) -> str:
        """Return the reason why products in fp8 by this recipe cannot run here, or "". A CPU emulates them."""
        return ""

    def apex_lacks(self) -> str:
        """Return the reason why kernels of NVIDIA apex cannot run on this device, or "" if they can."""
        return f"its kernels are for NVIDIA GPUs, and the device is {self.name}"

    def fused_lacks(self) -> str:
        """Return the reason why products here cannot read the memory of the node's other devices, or "" if they can."""
        return f"the device is {self.name}"

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """Return why no grouped GEMM runs here without counts on the host, or "". widths: of rows and products."""
        if dtype not in GROUPED_DTYPES:
            return f"no kernel takes {spelled(dtype)}"
        odd = [width for width in widths if width * dtype.itemsize % ALIGNMENT_BYTES]
        if odd:
            return f"the kernel takes rows of a multiple of {ALIGNMENT_BYTES} bytes, not of {odd[0]} {spelled(dtype)}"
        return ""

    def memory_pressure(self) -> MemoryPressure | None:
        """Return the statistics of torch's caching allocator; None on a device without it."""
        return None

    def save_memory_snapshot(self, path: Path) -> bool:
        """Write a snapshot for torch's memory viewer. Returns False on a device without torch's caching allocator."""
        return False

    def new_profiler(self) -> Any:
        """Return a profiler of this process and device, with the methods of ``torch.profiler.profile``."""
        return torch.profiler.profile(activities=self.profiled)

    @property
    def profiled(self) -> list[ProfilerActivity]:
        """Activities that torch's profiler records."""
        return [ProfilerActivity.CPU]

    def synchronize(self) -> None:
        """Wait until all enqueued work is done."""

    def new_stream(self, *, urgent: bool = False) -> Stream:
        """Return a new side stream.

        Kernels of an ``urgent`` one start before those of other streams that are ready. This is for the small kernels
        that produce a message: otherwise they would start only after the last block of the large kernel that is meant
        to hide the message.
        """
        return NoStream()

    def current_stream(self) -> Stream:
        """Return the stream to which operations are enqueued now."""
        return NoStream()

    def event(self) -> Event:
        """Return an event after all work that is enqueued in the current stream."""
        return self.current_stream().record_event()

    def timed_event(self) -> Callable[[], Event] | None:
        """Return a function that records timed events; None if waits block the host, whose clock then measures them."""
        return None

    def launch(self, op: Callable[[], T], stream: Stream | None = None, after: Event | None = None) -> T:
        """Enqueue ``op`` in a stream (None: the current one) and return its result. All collectives start here.

        On a side stream ``op`` starts after the event ``after``, or else after all work of the current stream.
        """
        if stream is None:
            return op()
        if after is None:
            stream.wait_stream(self.current_stream())
        else:
            stream.wait_event(after)
        with stream:
            return op()

    def after(self, stream: Stream) -> None:
        """Block the host, in any thread, until the work of ``stream`` is done. Does not wait for other streams."""
        stream.synchronize()

    def host_copy(self, x: Tensor) -> tuple[Tensor, Event]:
        """Copy ``x`` to the host. Returns (the copy, the event after which it is complete)."""
        return x, NoEvent()

    def integers(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Return an int64 tensor of these numbers on the device. The host does not wait for the copy."""
        return self.pin(torch.tensor(numbers, dtype=torch.int64)).to(self.torch_device, non_blocking=True)

    def values(self, x: Tensor) -> list[float]:
        """Return the values of a vector. The host waits for them."""
        return [*x.tolist()]

    def adopt(self, x: Tensor) -> None:
        """Record for the allocator that the current stream uses a tensor that another stream allocated."""

    def pin(self, x: Tensor) -> Tensor:
        """Return a host tensor in pinned memory, for copies without waiting. Callable from any thread."""
        return x

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in pinned host memory, which the device can read and write by itself."""
        return torch.zeros(numel, dtype=dtype)

    def peak_memory_bytes(self) -> int:
        """Return the peak memory so far: resident bytes of the process on a CPU, else allocated bytes of the device."""
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def spelled(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def keep_freed_memory() -> bool:
    """Let the C library serve large allocations from freed memory. Returns True if it accepted the setting.

    glibc maps every large allocation separately and unmaps it when it is freed. A training step frees all of its
    activations, so the kernel would clear the same memory page by page in every step. Settings of the user in the
    environment take precedence.
    """
    if any(name in os.environ for name in _USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_MMAP_MAX, 0) == 1 and mallopt(_TRIM_THRESHOLD, -1) == 1


class Indices:
    """Index tensors that their owner uses repeatedly. Creating one from a list each time would wait for the device."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Hashable, torch.device], Tensor] = {}

    def of(self, key: Hashable, device: torch.device, order: Callable[[], Sequence[int]]) -> Tensor:
        """Return the index tensor of ``key`` on a device, [n] int64; ``order`` gives its n indices the first time."""
        if (key, device) not in self._tensors:
            self._tensors[key, device] = torch.tensor(order(), device=device)
        return self._tensors[key, device]
