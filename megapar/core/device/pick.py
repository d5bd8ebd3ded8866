"""Selection of the device, by flag or by availability."""

from __future__ import annotations

import torch

from megapar.core.device.accelerators import CudaDevice, NpuDevice
from megapar.core.device.base import Device
from megapar.errors import Complaint, ConfigError
from megapar.machine import no_device


def available(kind: str) -> bool:
    """Return True if this machine has a device of this kind: cpu, cuda or npu."""
    return not no_device(kind) and (kind != "cuda" or torch.cuda.is_available())


def pick(kind: str, local_rank: int = 0) -> Device:
    """Return the device of this kind for a rank; ``auto`` selects a GPU, else an NPU, else the CPU.

    Raises ConfigError if this machine does not have the requested kind.
    """
    classes: dict[str, type[Device]] = {"cuda": CudaDevice, "npu": NpuDevice, "cpu": Device}
    if kind == "auto":
        kind = next(name for name in classes if available(name))
    if not available(kind):
        reason = no_device(kind) or "torch sees no GPU"
        raise ConfigError(
            [Complaint("device", f"--device {kind}, but {reason} on this machine.", "Use --device cpu or auto.")]
        )
    return classes[kind](local_rank)
