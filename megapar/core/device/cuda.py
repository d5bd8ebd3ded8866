"""NVIDIA (and ROCm) GPUs."""

from __future__ import annotations

import importlib.util

from megapar.core.device.base import Accelerator


class CudaDevice(Accelerator):
    """A GPU; host tensors still travel over gloo."""

    type = "cuda"
    backend = "cpu:gloo,cuda:nccl"

    def compiler_lacks(self) -> str:
        """Code for a GPU is made by Triton."""
        return "" if importlib.util.find_spec("triton") else "triton is not installed"
