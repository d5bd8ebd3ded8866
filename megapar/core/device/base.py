"""Differences between devices. Everything that torch handles the same for all of them is left to torch."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from megapar.core.device.allocator import keep_freed_memory
from megapar.core.device.grouped import ALIGNMENT_BYTES, GROUPED_DTYPES
from megapar.core.device.kinds import kind_called

# torch.Stream and torch.Event if the device has streams, else NoStream and NoEvent.
Stream = Any
Event = Any

URGENT = -1  # torch's priority above the default of 0, on every device

T = TypeVar("T")


class MemoryPressure(NamedTuple):
    """Statistics of torch's caching allocator.

    Attributes:
        held_bytes: Bytes reserved from the device and not allocated.
        retries: Number of allocations that first had to release all cached memory, each a wait for the device.
        allocated_bytes: Bytes in tensors now.
    """

    held_bytes: int
    retries: int
    allocated_bytes: int


class NoEvent:
    """Event of a synchronous device: all work before it is done."""

    def synchronize(self) -> None:
        """Do nothing: the work is done."""


class NoStream:
    """Stream of a synchronous device: enqueued work is done at once."""

    def wait_stream(self, other: object) -> None:
        """Do nothing: the work of the other stream is done."""

    def record_event(self) -> NoEvent:
        """Return an event after all work so far."""
        return NoEvent()

    def wait_event(self, event: object) -> None:
        """Do nothing: the work before the event is done."""

    def synchronize(self) -> None:
        """Do nothing: the work is done."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class Device:
    """The CPU, and the base class of accelerators, which override the differences.

    Attributes:
        type: torch's device type.
        backend: Backend for ``init_process_group``.
        queue_backend: Backend of groups that only send tensors of the device; None for that of all groups.
        is_async: The host enqueues work without waiting for it. Waits of the host are then deferred by one slice, so
            that the device always has queued work. On a synchronous device this would only delay the launch.
        skips_updates: The kernel of the optimizer can skip an update by a value on the device, found_inf.
        scales_gradients: The kernel of the optimizer can divide fp32 gradients by a value on the device, grad_scale. On
            a CPU this would divide where clipping multiplies, and save no launch.
        repeatable: Environment variables that make its libraries sum in a fixed order, read at their first use.
        local_rank: Number of the device on this machine.
        torch_device: Device of the tensors.
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
        """Return argument ``pg_options`` of a new group of these axes, or of a queue; None for defaults.

        Args:
            names: Names of the axes that share the group.
            timeout: Timeout of the group.
            queue: The group is a queue between two pipeline stages.
        """
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
        """Return the reason why a kernel of ``attention_table`` is not installed here, or "" if it is."""
        return f"{kernel} is a kernel for NVIDIA GPUs, and the device is {self.name}"

    def activate_flash3(self) -> None:
        """Let FlashAttention-3 compute what torch's FlashAttention computes otherwise, in this whole process."""
        raise NotImplementedError(f"{self.name} has no FlashAttention-3; see attention_lacks")

    def compiler_lacks(self) -> str:
        """Return the reason why torch.compile cannot generate code for this device, or "" if it can."""
        if shutil.which(os.environ.get("CXX", "")) or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            return ""
        return "this machine has no C++ compiler (g++, clang++, or the one that CXX names)"

    def fp8_lacks(self) -> str:
        """Return the reason why fp8 matrix products cannot run on this device, or "" if they can."""
        return "fp8 products need an NVIDIA GPU of compute capability 8.9 or more"

    def fused_lacks(self) -> str:
        """Return the reason why products here cannot read the memory of the node's other devices, or "" if they can."""
        return f"the device is {self.name}"

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """Return the reason why grouped GEMM has no kernel here that runs without the counts on the host; "" if it has.

        Args:
            dtype: Dtype of rows and weights.
            widths: Features of the rows and of the products.
        """
        if dtype not in GROUPED_DTYPES:
            return f"no kernel takes {_spelled(dtype)}"
        odd = [width for width in widths if width * dtype.itemsize % ALIGNMENT_BYTES]
        if odd:
            return f"the kernel takes rows of a multiple of {ALIGNMENT_BYTES} bytes, not of {odd[0]} {_spelled(dtype)}"
        return ""

    def memory_pressure(self) -> MemoryPressure | None:
        """Return the statistics of torch's caching allocator; None on a device without it."""
        return None

    def save_memory_snapshot(self, path: Path) -> bool:
        """Write a snapshot for torch's memory viewer. Returns False on a device without torch's caching allocator."""
        return False

    @property
    def profiled(self) -> list[ProfilerActivity]:
        """Activities that torch's profiler records."""
        return [ProfilerActivity.CPU]

    def synchronize(self) -> None:
        """Wait until all enqueued work is done."""

    def new_stream(self, *, urgent: bool = False) -> Stream:
        """Return a new side stream.

        Args:
            urgent: Kernels of this stream start before those of other streams that are ready. For the small kernels
                that produce a message: otherwise they would start only after the last block of the large kernel that
                is meant to hide the message.
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
        """Enqueue ``op`` and return its result. All collectives are launched through this method.

        Args:
            op: Enqueues the work.
            stream: The stream; None for the current one.
            after: Event after which ``op`` starts on a side stream; None to start after all work that is enqueued in
                the current stream.
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
        values: list[float] = x.tolist()
        return values

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


class Accelerator(Device):
    """Base class of CUDA and Ascend devices, by torch's device module of their type.

    Attributes:
        module: ``torch.cuda`` or ``torch.npu``.
    """

    is_async = True

    def __init__(self, local_rank: int = 0) -> None:
        super().__init__(local_rank)
        self.module = torch.get_device_module(self.type)
        self.torch_device = torch.device(self.type, local_rank)
        self.module.set_device(local_rank)

    @property
    def name(self) -> str:
        """Model of the device, as its driver reports it."""
        return str(self.module.get_device_name(self.local_rank))

    @property
    def device_id(self) -> torch.device | None:
        """This rank's device."""
        return self.torch_device

    @property
    def default_dtype(self) -> torch.dtype:
        """Compute dtype of --dtype auto: bf16, or fp16 if the device has no bf16 products."""
        kind = kind_called(self.name)
        has_bf16 = self._has_bf16 if kind is None else kind.default_dtype == "bf16"
        return torch.bfloat16 if has_bf16 else torch.float16

    @property
    def _has_bf16(self) -> bool:
        """True if a device that is not in the device table has bf16 products."""
        return True

    def prepare_process(self) -> None:
        """Let gloo, which every group has for its few host tensors, connect two ranks at their first message.

        Otherwise each group would connect all of its ranks at the start, by thousands of unused sockets.
        """
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

    def prepare_thread(self) -> None:
        """Select this rank's device, so that no other device gets a context (half a GB of its memory)."""
        self.module.set_device(self.local_rank)

    def synchronize(self) -> None:
        """Wait until all work enqueued on the device is done."""
        self.module.synchronize()

    def new_stream(self, *, urgent: bool = False) -> Stream:
        """Return a new stream of this rank's device, with high priority if ``urgent``."""
        stream: Stream = torch.Stream(self.torch_device, priority=URGENT if urgent else 0)
        return stream

    def current_stream(self) -> Stream:
        """Return the current stream of this rank's device."""
        stream: Stream = torch.accelerator.current_stream(self.torch_device)
        return stream

    def timed_event(self) -> Callable[[], Event] | None:
        """Return a function that records a timed event on the current stream."""

        def mark() -> Event:
            event = self.module.Event(enable_timing=True)
            event.record()
            return event

        return mark

    def host_copy(self, x: Tensor) -> tuple[Tensor, Event]:
        """Copy to pinned memory without waiting. Returns (the copy, the event after which it is complete)."""
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        return host, self.event()

    def adopt(self, x: Tensor) -> None:
        """Record the use by the current stream for torch's caching allocator."""
        x.record_stream(self.current_stream())

    def pin(self, x: Tensor) -> Tensor:
        """Return the tensor in pinned memory, which torch does not reuse until the copies out of it are done."""
        with self.module.device(self.local_rank):  # The current device of another thread is the first one.
            return x.pin_memory()

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in pinned host memory."""
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def memory_pressure(self) -> MemoryPressure | None:
        """Return the statistics of torch's caching allocator."""
        stats = self.module.memory_stats()
        allocated = int(stats.get("allocated_bytes.all.current", 0))
        held = int(stats.get("reserved_bytes.all.current", 0)) - allocated
        return MemoryPressure(held, int(stats.get("num_alloc_retries", 0)), allocated)

    def save_memory_snapshot(self, path: Path) -> bool:
        """Write a snapshot for torch's memory viewer, and return True."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.module.memory._dump_snapshot(str(path))
        return True

    def peak_memory_bytes(self) -> int:
        """Return the peak of the bytes allocated on the device so far."""
        return int(self.module.max_memory_allocated())


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
