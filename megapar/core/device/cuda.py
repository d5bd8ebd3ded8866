"""NVIDIA (and ROCm) GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from megapar.core.device.base import Accelerator
from megapar.core.device.communicators import QUEUE_CHANNELS
from megapar.core.device.pinned import LEAST_BYTES, pinned_exactly

FP8_CAPABILITY, BF16_CAPABILITY = (8, 9), (8, 0)
GROUPED_MAJORS = (9, 10)  # of torch's grouped product, 2.11 to 2.13


class CudaDevice(Accelerator):
    """A GPU; host tensors still travel over gloo."""

    type = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    queue_backend = "nccl"
    # A workspace per stream for cuBLAS; rings add in the order of the ranks, where switches (NVLS) need not.
    repeatable: ClassVar[Mapping[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}

    def group_options(self, names: Collection[str], timeout: timedelta, *, queue: bool) -> Any:
        """A queue's kernels get few blocks: those that wait for a message stand beside what is computed meanwhile."""
        if not queue:
            return None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.max_ctas = QUEUE_CHANNELS
        return options

    @property
    def profiled(self) -> list[ProfilerActivity]:
        """Kernels beside what the host does."""
        return [*super().profiled, ProfilerActivity.CUDA]

    def pinned_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, of large buffers exactly what is asked for."""
        if numel * dtype.itemsize < LEAST_BYTES:
            return super().pinned_zeros(numel, dtype)
        return pinned_exactly(numel, dtype)

    def compiler_lacks(self) -> str:
        """Code for a GPU is made by Triton."""
        return "" if importlib.util.find_spec("triton") else "triton is not installed"

    def fp8_lacks(self) -> str:
        """Ada, Hopper and what came after them have such products."""
        if torch.version.hip is None and self.capability >= FP8_CAPABILITY:
            return ""
        return f"{super().fp8_lacks()}, and {self._own_capability}"

    def grouped_lacks(self, dtype: torch.dtype, widths: Sequence[int]) -> str:
        """Where torch has no kernel its grouped product is a loop that asks for the counts every time."""
        if torch.version.hip is not None or self.capability[0] not in GROUPED_MAJORS:
            majors = " and ".join(f"{major}.x" for major in GROUPED_MAJORS)
            return f"the kernel is for NVIDIA GPUs of compute capability {majors}, and {self._own_capability}"
        if dtype != torch.bfloat16:
            return f"the kernel takes bfloat16, not {str(dtype).removeprefix('torch.')}"
        return super().grouped_lacks(dtype, widths)

    @property
    def _has_bf16(self) -> bool:
        """From Ampere on; before it (V100, T4) torch emulates such products, slowly."""
        return torch.version.hip is not None or self.capability >= BF16_CAPABILITY

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor number of what the GPU can do, as CUDA counts it."""
        return torch.cuda.get_device_capability(self.local_rank)

    @property
    def _own_capability(self) -> str:
        return f"{self.name} has {'.'.join(map(str, self.capability))}"
