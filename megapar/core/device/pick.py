"""Chooses the device once, by flag or by asking torch."""

from __future__ import annotations

import torch

from megapar.config.start import no_device
from megapar.core.device.base import Device
from megapar.core.device.cuda import CudaDevice
from megapar.core.device.npu import NpuDevice
from megapar.errors import Complaint, ConfigError


def available(kind: str) -> bool:
    """Whether this machine has a device of this kind: cpu, cuda or npu."""
    return not no_device(kind) and (kind != "cuda" or torch.cuda.is_available())


def pick(kind: str, local_rank: int = 0) -> Device:
    """The device of this kind for a rank; ``auto`` takes a GPU, else an NPU, else the CPU.

    Raises ConfigError where the kind is asked for and this machine has none.
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
