"""GPUs of NVIDIA, and of AMD, whose build of torch (ROCm) has the same names: its device type is cuda, RCCL is nccl.

What only NVIDIA's GPUs have is asked by ``torch.version.hip``. No AMD GPU has been run on.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity

from megapar.core.device.attention.table import CUDNN, FLASH3
from megapar.core.device.base import Accelerator
from megapar.core.device.communicators import QUEUE_CHANNELS
from megapar.core.device.pinned import LEAST_BYTES, pinned_exactly
from megapar.core.torch_names import activate_flash3, flash3_lacks

FP8_CAPABILITY, BF16_CAPABILITY = (8, 9), (8, 0)
GROUPED_MAJORS = (9, 10)  # major compute capabilities of torch's grouped GEMM, torch 2.11 to 2.13


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
            options.config.max_ctas = QUEUE_CHANNELS
        return options

    def prepare_process(self) -> None:
        """Turn off torch's advice on messages that are in order on their communicator: a queue's are meant to be."""
        super().prepare_process()
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")

    @property
    def profiled(self) -> list[ProfilerActivity]:
        """Activities of the host, and kernels."""
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

    def fp8_lacks(self) -> str:
        """Return a reason unless the GPU is of NVIDIA's Ada or Hopper generation or newer."""
        if (self.capability or (0, 0)) >= FP8_CAPABILITY:
            return ""
        return f"{super().fp8_lacks()}, and {self._own_capability}"

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
            return f"the kernel is for NVIDIA GPUs of compute capability {majors}, and {self._own_capability}"
        if dtype != torch.bfloat16:
            return f"the kernel takes bfloat16, not {str(dtype).removeprefix('torch.')}"
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
    def _own_capability(self) -> str:
        return f"{self.name} has {'none' if self.capability is None else '.'.join(map(str, self.capability))}"
