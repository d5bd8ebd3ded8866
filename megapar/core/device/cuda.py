"""NVIDIA (and ROCm) GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from megapar.core.device.base import Accelerator
from megapar.core.device.pinned import LEAST_BYTES, pinned_exactly

FP8_CAPABILITY = (8, 9)


class CudaDevice(Accelerator):
    """A GPU; host tensors still travel over gloo."""

    type = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    # A workspace per stream for cuBLAS; rings add in the order of the ranks, where switches (NVLS) need not.
    repeatable: ClassVar[Mapping[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}

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
        capability = torch.cuda.get_device_capability(self.local_rank)
        if torch.version.hip is None and capability >= FP8_CAPABILITY:
            return ""
        found = ".".join(map(str, capability))
        return f"{super().fp8_lacks()}, and {self.name} has {found}"
