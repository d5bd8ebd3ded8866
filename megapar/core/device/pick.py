"""Chooses the device once, by flag or by asking torch."""

from __future__ import annotations

import importlib.util

import torch

from megapar.core.device.base import Device
from megapar.core.device.cuda import CudaDevice
from megapar.core.device.npu import NpuDevice
from megapar.errors import Complaint, ConfigError


def available(kind: str) -> bool:
    """Whether this machine has a device of this kind: cpu, cuda or npu."""
    if kind == "cuda":
        return torch.cuda.is_available()
    if kind == "npu":
        return importlib.util.find_spec("torch_npu") is not None
    return True


def pick(kind: str, local_rank: int = 0) -> Device:
    """The device of this kind for a rank; ``auto`` takes a GPU, else an NPU, else the CPU.

    Raises ConfigError where the kind is asked for and this machine has none.
    """
    classes: dict[str, type[Device]] = {"cuda": CudaDevice, "npu": NpuDevice, "cpu": Device}
    if kind == "auto":
        kind = next(name for name in classes if available(name))
    if not available(kind):
        reason = "torch sees no GPU" if kind == "cuda" else "torch_npu is not installed"
        raise ConfigError(
            [Complaint("device", f"--device {kind}, but {reason} on this machine.", "Use --device cpu or auto.")]
        )
    return classes[kind](local_rank)
