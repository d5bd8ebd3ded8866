"""What differs between devices, and nothing else; everything torch knows by itself is asked of torch."""

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

# torch.Stream and torch.Event where the device has streams, NoStream and NoEvent elsewhere.
Stream = Any
Event = Any

URGENT = -1  # the priority above the usual 0, as torch counts them on every device

T = TypeVar("T")


class MemoryPressure(NamedTuple):
    """An allocator's own account. held_bytes: reserved from the device and not allocated. retries: allocations that
    first had to give everything cached back, each a wait for the device. allocated_bytes: in tensors now.
    """

    held_bytes: int
    retries: int
    allocated_bytes: int


class NoEvent:
    """The event of a device that does everything at once: what stands before it has been done."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class NoStream:
    """The stream of a device that has none: what is enqueued has been done."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""

    def record_event(self) -> NoEvent:
        """What has been enqueued has happened."""
        return NoEvent()

    def wait_event(self, event: object) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class Device:
    """The CPU; accelerators override what differs.

    torch_device: where tensors live. backend: what ``init_process_group`` takes.
    """

    type = "cpu"
    backend = "gloo"
    # Of groups for messages of the device's tensors alone; None: that of all groups.
    queue_backend: str | None = None
    # Whether the host enqueues work and goes on. Then what the host must wait for is asked for one slice late, when
    # the next slice's work stands in the queue; where it does not, waiting late would only launch late.
    is_async = False
    # Whether the optimizer's kernel can leave everything as it is by a number on the device.
    skips_updates = True
    # Environment that its libraries read when they are first used, without which sums come in an order by chance.
    repeatable: ClassVar[Mapping[str, str]] = {}

    def __init__(self, local_rank: int = 0) -> None:
        self.local_rank = local_rank
        self.torch_device = torch.device("cpu")

    @property
    def name(self) -> str:
        """For people: the kind of device and how many threads or which model."""
        return f"cpu ({torch.get_num_threads()} threads)"

    @property
    def device_id(self) -> torch.device | None:
        """What ``init_process_group(device_id=...)`` takes for eager communicators; None on CPU."""
        return None

    def group_options(self, names: Collection[str], timeout: timedelta, *, queue: bool) -> Any:
        """What ``new_group(pg_options=...)`` takes for the group of these axes, or of a queue; None: its own."""
        return None

    @property
    def default_dtype(self) -> torch.dtype:
        """The compute dtype where none is asked for."""
        return torch.float32

    def prepare_process(self) -> None:
        """Settings of the whole process that training on this device wants."""
        keep_freed_memory()

    def prepare_thread(self) -> None:
        """Call first in a thread that uses the device: there it would be the process's first one otherwise."""

    def repeat_results(self) -> None:
        """Only what repeats its results to the last bit from now on: kernels, and reductions between ranks.

        What the environment already says stays. Before the first product and the first process group.
        """
        for name, value in self.repeatable.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)

    def compiler_lacks(self) -> str:
        """Why torch.compile cannot make code for this device here; "" where it can."""
        if shutil.which(os.environ.get("CXX", "")) or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            return ""
        return "this machine has no C++ compiler (g++, clang++, or the one that CXX names)"

    def fp8_lacks(self) -> str:
        """Why matrix products in fp8 cannot run on this device; "" where they can."""
        return "fp8 products need an NVIDIA GPU of compute capability 8.9 or more"

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """Why no kernel multiplies the rows of many experts here before the host knows their counts; "" where one does.

        widths: features of the rows and of the products.
        """
        if dtype not in GROUPED_DTYPES:
            return f"no kernel takes {_spelled(dtype)}"
        odd = [width for width in widths if width * dtype.itemsize % ALIGNMENT_BYTES]
        if odd:
            return f"the kernel takes rows of a multiple of {ALIGNMENT_BYTES} bytes, not of {odd[0]} {_spelled(dtype)}"
        return ""

    def memory_pressure(self) -> MemoryPressure | None:
        """What the device's allocator has to say; None where there is none of torch's."""
        return None

    def save_memory_snapshot(self, path: Path) -> bool:
        """Write what is allocated for torch's viewer; False where no allocator of torch's keeps account."""
        return False

    @property
    def profiled(self) -> list[ProfilerActivity]:
        """What torch's profiler records of it."""
        return [ProfilerActivity.CPU]

    def synchronize(self) -> None:
        """Wait until everything enqueued is done; nothing to do on a CPU."""

    def new_stream(self, *, urgent: bool = False) -> Stream:
        """A queue of work beside the current one.

        urgent: its kernels go before those of other streams that stand ready. For what feeds a message: small kernels,
        which would else begin when the large one that the message is to hide under has begun its last block.
        """
        return NoStream()

    def current_stream(self) -> Stream:
        """The queue that operations go to now."""
        return NoStream()

    def event(self) -> Event:
        """A mark behind everything that stands in the current stream."""
        return self.current_stream().record_event()

    def timed_event(self) -> Callable[[], Event] | None:
        """What makes marks that know their time; None where waits block the host and its clock will do."""
        return None

    def launch(self, op: Callable[[], T], stream: Stream | None = None, after: Event | None = None) -> T:
        """Enqueue ``op``, the one way in which collectives are launched.

        stream: None is the current one. after: an event; on a stream of its own ``op`` then starts behind that event
        and not behind what the current stream was given since. Returns what ``op`` returns.
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
        """Wait, from any thread of the host, until a stream has done what it was given, and for no other one."""
        stream.synchronize()

    def host_copy(self, x: Tensor) -> tuple[Tensor, Event]:
        """(the same on the host, the event behind which it is there)."""
        return x, NoEvent()

    def values(self, x: Tensor) -> list[float]:
        """What a vector holds; the host waits for it."""
        values: list[float] = x.tolist()
        return values

    def adopt(self, x: Tensor) -> None:
        """The current stream uses a tensor whose memory belongs to another one: the allocator has to know."""

    def pin(self, x: Tensor) -> Tensor:
        """A host tensor where the device can copy from by itself, so that nobody waits; callable from any thread."""
        return x

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from and to by itself, filled with zeros."""
        return torch.zeros(numel, dtype=dtype)

    def peak_memory_bytes(self) -> int:
        """Highest number of bytes held so far: resident memory of the process on CPU, allocated bytes elsewhere."""
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Accelerator(Device):
    """What CUDA and Ascend devices share: torch's device module of the type answers."""

    is_async = True

    def __init__(self, local_rank: int = 0) -> None:
        super().__init__(local_rank)
        self.module = torch.get_device_module(self.type)
        self.torch_device = torch.device(self.type, local_rank)
        self.module.set_device(local_rank)

    @property
    def name(self) -> str:
        """The model of the device, as its driver calls it."""
        return str(self.module.get_device_name(self.local_rank))

    @property
    def device_id(self) -> torch.device | None:
        """This rank's device."""
        return self.torch_device

    @property
    def default_dtype(self) -> torch.dtype:
        """bf16, or fp16 where the device has no products in bf16."""
        kind = kind_called(self.name)
        has = self._has_bf16 if kind is None else kind.default_dtype == "bf16"
        return torch.bfloat16 if has else torch.float16

    @property
    def _has_bf16(self) -> bool:
        """Of a device that no row of the device table names."""
        return True

    def prepare_process(self) -> None:
        """Let gloo, which is beside every group here for the few host tensors, connect two ranks when they first meet.

        Else each group would connect all its ranks at its start: thousands of sockets that nobody uses.
        """
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

    def prepare_thread(self) -> None:
        """Choose this rank's device, so that none of the others gets a context (half a GB of its memory)."""
        self.module.set_device(self.local_rank)

    def synchronize(self) -> None:
        """Wait until everything enqueued on the device is done."""
        self.module.synchronize()

    def new_stream(self, *, urgent: bool = False) -> Stream:
        """A stream of this rank's device."""
        stream: Stream = torch.Stream(self.torch_device, priority=URGENT if urgent else 0)
        return stream

    def current_stream(self) -> Stream:
        """The current stream of this rank's device."""
        stream: Stream = torch.accelerator.current_stream(self.torch_device)
        return stream

    def timed_event(self) -> Callable[[], Event] | None:
        """Timed events on the current stream."""

        def mark() -> Event:
            event = self.module.Event(enable_timing=True)
            event.record()
            return event

        return mark

    def host_copy(self, x: Tensor) -> tuple[Tensor, Event]:
        """Into page-locked memory, without waiting."""
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        return host, self.event()

    def adopt(self, x: Tensor) -> None:
        """Tell the caching allocator."""
        x.record_stream(self.current_stream())

    def pin(self, x: Tensor) -> Tensor:
        """Page-locked; torch gives the memory to nobody else before the copies out of it are done."""
        with self.module.device(self.local_rank):  # another thread's current device is the first one
            return x.pin_memory()

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def memory_pressure(self) -> MemoryPressure | None:
        """Of torch's caching allocator."""
        stats = self.module.memory_stats()
        allocated = int(stats.get("allocated_bytes.all.current", 0))
        held = int(stats.get("reserved_bytes.all.current", 0)) - allocated
        return MemoryPressure(held, int(stats.get("num_alloc_retries", 0)), allocated)

    def save_memory_snapshot(self, path: Path) -> bool:
        """As torch's memory viewer reads it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.module.memory._dump_snapshot(str(path))
        return True

    def peak_memory_bytes(self) -> int:
        """Highest number of bytes allocated on the device so far."""
        return int(self.module.max_memory_allocated())


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
