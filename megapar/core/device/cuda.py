"""NVIDIA (and ROCm) GPUs."""

from __future__ import annotations

from megapar.core.device.base import Accelerator


class CudaDevice(Accelerator):
    """A GPU; host tensors still travel over gloo."""

    type = "cuda"
    backend = "cpu:gloo,cuda:nccl"
