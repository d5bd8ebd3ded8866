"""Devices that compute asynchronously to the host: GPUs of NVIDIA and AMD, and Ascend NPUs by torch_npu.

AMD's build of torch (ROCm) has NVIDIA's names: its device type is cuda, RCCL is nccl. What only NVIDIA's GPUs have is
asked by ``torch.version.hip``. No AMD GPU has been run on.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity

from megapar.core.device.apex import apex_lacks
from megapar.core.device.attention.table import CUDNN, FLASH3
from megapar.core.device.base import Device, Event, MemoryPressure, Stream, spelled
from megapar.core.device.kinds import SMALL_HCCL_MIB, TENSORWISE, device_class, fp8_needs, is_light, kind_called
from megapar.core.torch_names import activate_flash3, flash3_lacks
from megapar.errors import Complaint, ConfigError
from megapar.machine import no_device

URGENT = -1  # torch's priority above the default of 0, on every device
BF16_CAPABILITY = (8, 0)
FP8_CUDA = "12.9"  # the first whose cuBLAS has scales by blocks
GROUPED_MAJORS = (9, 10)  # major compute capabilities of torch's grouped GEMM, torch 2.11 to 2.13
# Pinned memory below this size is torch's: rounding costs little, but a mapping of whole pages would cost more.
LEAST_BYTES = 1 << 20


class Accelerator(Device):
    """Base class of CUDA and Ascend devices; ``module`` is ``torch.cuda`` or ``torch.npu``."""

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
        self.module.synchronize()

    def new_stream(self, *, urgent: bool = False) -> Stream:
        return torch.Stream(self.torch_device, priority=URGENT if urgent else 0)

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self.torch_device)

    def timed_event(self) -> Callable[[], Event] | None:

        def mark() -> Event:
            event = self.module.Event(enable_timing=True)
            event.record()
            return event

        return mark

    def host_copy(self, x: Tensor) -> tuple[Tensor, Event]:
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
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def memory_pressure(self) -> MemoryPressure | None:
        stats = self.module.memory_stats()
        allocated = int(stats.get("allocated_bytes.all.current", 0))
        held = int(stats.get("reserved_bytes.all.current", 0)) - allocated
        return MemoryPressure(held, int(stats.get("num_alloc_retries", 0)), allocated)

    def fp8_lacks(self, recipe: str) -> str:
        return f"products of the recipe {recipe} need an NVIDIA GPU of {fp8_needs(None, recipe)}"

    def save_memory_snapshot(self, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.module.memory._dump_snapshot(str(path))
        return True

    def peak_memory_bytes(self) -> int:
        return int(self.module.max_memory_allocated())


class CudaDevice(Accelerator):
    """A GPU. Host tensors are still sent over gloo."""

    type = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    queue_backend = "nccl"
    scales_gradients = True
    # cuBLAS gets a workspace per stream. NCCL's rings add in the order of the ranks, unlike switches (NVLS).
    repeatable: ClassVar[Mapping[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}

    def group_options(self, names: Collection[str], timeout: timedelta, *, queue: bool) -> Any:
        """Let messages overtake the waiting blocks of products, under any launcher.

        Kernels of a queue, which wait for a message while other kernels compute, get few blocks.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.is_high_priority_stream = True
        if queue:
            options.config.max_ctas = device_class(self.type).queue_blocks
        return options

    def prepare_process(self) -> None:
        """Turn off torch's advice on messages that are in order on their communicator: a queue's are meant to be."""
        super().prepare_process()
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")

    @property
    def profiled(self) -> list[ProfilerActivity]:
        return [*super().profiled, ProfilerActivity.CUDA]

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in pinned host memory. Large buffers have exactly the requested size."""
        if numel * dtype.itemsize < LEAST_BYTES:
            return super().pinned_zeros(numel, dtype)
        return pinned_exactly(numel, dtype)

    def compiler_lacks(self) -> str:
        """Return a reason if Triton, which generates code for GPUs, is not installed; else ""."""
        return "" if importlib.util.find_spec("triton") else "triton is not installed"

    def attention_lacks(self, kernel: str) -> str:
        """Return a reason on ROCm, for cuDNN without it, and for FlashAttention-3 if its package is not installed."""
        if torch.version.hip is not None:
            return super().attention_lacks(kernel)
        if kernel == CUDNN and not torch.backends.cudnn.is_available():
            return "this build of torch has no cuDNN"
        return flash3_lacks() if kernel == FLASH3 else ""

    def activate_flash3(self) -> None:
        """Let FlashAttention-3 compute what torch's FlashAttention computes otherwise, by torch's registry."""
        activate_flash3()

    def fp8_lacks(self, recipe: str) -> str:
        """Return a reason unless torch has products of the recipe; scales by blocks need the cuBLAS of CUDA 12.9."""
        if fp8_needs(self.capability, recipe):
            return f"{super().fp8_lacks(recipe)}, and {self._has_capability}"
        version = FP8_CUDA if recipe == TENSORWISE else torch.version.cuda or "0.0"
        if not hasattr(F, "scaled_mm") or [*map(int, version.split("."))] < [*map(int, FP8_CUDA.split("."))]:
            return f"its products need torch 2.10 built with CUDA {FP8_CUDA} or more; torch {torch.__version__} is not"
        return ""

    def apex_lacks(self) -> str:
        """Return a reason on ROCm, and unless NVIDIA's package is installed with its CUDA extensions."""
        return super().apex_lacks() if torch.version.hip is not None else apex_lacks()

    def fused_lacks(self) -> str:
        """Return a reason on ROCm, whose fused operators are not tried, and without access to the node's other GPUs."""
        if torch.version.hip is not None:
            return super().fused_lacks()
        others = (index for index in range(torch.cuda.device_count()) if index != self.local_rank)
        if all(torch.cuda.can_device_access_peer(self.local_rank, other) for other in others):
            return ""
        return f"the driver lets {self.name} read no other GPU, as on cards without peer-to-peer access"

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """Return the reason why torch has no grouped GEMM kernel here, or "" if it has one.

        torch's fallback is a loop for which the host waits for the counts every time.
        """
        if self.capability is None or self.capability[0] not in GROUPED_MAJORS:
            majors = " and ".join(f"{major}.x" for major in GROUPED_MAJORS)
            return f"the kernel is for NVIDIA GPUs of compute capability {majors}, and {self._has_capability}"
        if dtype != torch.bfloat16:
            return f"the kernel takes bfloat16, not {spelled(dtype)}"
        return super().grouped_lacks(dtype, widths)

    @property
    def _has_bf16(self) -> bool:
        """True from Ampere on. On older GPUs (V100, T4) torch emulates bf16 products, slowly."""
        return self.capability is None or self.capability >= BF16_CAPABILITY

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of an NVIDIA GPU: (major, minor); None of an AMD GPU.

        torch reports the number of AMD's architecture instead, which is 9.0, Hopper's, of an MI250.
        """
        return torch.cuda.get_device_capability(self.local_rank) if torch.version.hip is None else None

    @property
    def _has_capability(self) -> str:
        return f"{self.name} has {'none' if self.capability is None else '.'.join(map(str, self.capability))}"


class NpuDevice(Accelerator):
    """An Ascend NPU. Creating one imports torch_npu, which registers the device type and the hccl backend."""

    type = "npu"
    backend = "cpu:gloo,npu:hccl"
    queue_backend = "hccl"
    skips_updates = False
    repeatable: ClassVar[Mapping[str, str]] = {"HCCL_DETERMINISTIC": "true"}

    def __init__(self, local_rank: int = 0) -> None:
        import torch_npu  # noqa: F401  the import registers the device

        super().__init__(local_rank)

    def prepare_process(self) -> None:
        """Keep torch's memory layout of tensors: each view and collective would copy the vendor's internal formats."""
        super().prepare_process()
        self.module.config.allow_internal_format = False

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """Return a reason for unsupported dtypes only: npu_grouped_matmul accepts rows of any width."""
        return super().grouped_lacks(dtype, ())

    def group_options(self, names: Collection[str], timeout: timedelta, *, queue: bool) -> Any:
        """Request small buffers for queues and for axes with small messages, if this version of torch_npu allows it."""
        import torch_npu

        groups: Any = getattr(torch_npu._C._distributed_c10d, "ProcessGroupHCCL", None)
        if not (queue or is_light(names)) or not hasattr(getattr(groups, "Options", None), "hccl_config"):
            return None
        options = groups.Options()
        options._timeout = timeout
        options.hccl_config = {"hccl_buffer_size": SMALL_HCCL_MIB}
        return options

    def new_profiler(self) -> Any:
        """Return the vendor's profiler, which has torch's methods; torch's own records the host only."""
        from torch_npu import profiler

        return profiler.profile(activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU])

    def compiler_lacks(self) -> str:
        """Return a reason in every case: this version does not compile for NPUs."""
        return "torch.compile generates code only for CPUs and GPUs"


def pinned_exactly(numel: int, dtype: torch.dtype) -> Tensor:
    """Return [numel] zeros in page-locked host memory that a CUDA device reads and writes, freed with their storage.

    torch's allocator rounds up to the next power of two, so that a model's master weights and moments may take nearly
    twice their size. Unlike it, this does not hold memory back while a copy runs: keep the buffer until its last copy
    has been waited for.

    Raises RuntimeError if the driver refuses to register the memory (``ulimit -l``, the limit of a container).
    """
    pages = _Pages(-1, numel * dtype.itemsize)  # zeros on pages that nothing else uses
    zeros = torch.frombuffer(pages, dtype=dtype)
    pages.register(zeros.data_ptr())
    return zeros


class _Pages(mmap.mmap):
    """A mapping that is unregistered from the driver before it is unmapped; a weak reference would be too late."""

    address = 0

    def register(self, address: int) -> None:
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        except RuntimeError:
            with suppress(
                RuntimeError
            ):  # launches read and clear CUDA's pending error, or the next kernel would raise it
                torch.ones(1, device="cuda")
            raise
        self.address = address

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def available(kind: str) -> bool:
    """Return True if this machine has a device of this kind: cpu, cuda or npu."""
    return not no_device(kind) and (kind != "cuda" or torch.cuda.is_available())


def pick(kind: str, local_rank: int = 0) -> Device:
    """Return the device of this kind; ``auto``: a GPU, else an NPU, else the CPU. Raises ConfigError without it."""
    classes: dict[str, type[Device]] = {"cuda": CudaDevice, "npu": NpuDevice, "cpu": Device}
    if kind == "auto":
        kind = next(name for name in classes if available(name))
    if not available(kind):
        reason = no_device(kind) or "torch sees no GPU"
        raise ConfigError(
            [Complaint("device", f"--device {kind}, but {reason} on this machine.", "Use --device cpu or auto.")]
        )
    return classes[kind](local_rank)
