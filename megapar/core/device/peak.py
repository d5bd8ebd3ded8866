"""What a device could compute at best, for MFU."""

from __future__ import annotations

import time

import torch

from megapar.core.device.base import Device
from megapar.core.device.kinds import kind_called

_TOLD = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # in others a product may be made of narrower ones

_LEAST_SECONDS = 0.02
_MEASURED: dict[tuple[str, torch.dtype], float] = {}  # by name of the device: one process has one of a kind


def peak_flops(device: Device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of the device in ``dtype`` and where the figure comes from: ``table`` or ``measured``.

    Measured is the best of a few square GEMMs on this machine with this process's threads.
    """
    kind = kind_called(device.name)
    if kind is not None and kind.kernels != "cpu" and _TOLD.get(dtype) in kind.flops:
        return kind.flops[_TOLD[dtype]], "table"
    key = device.name, dtype
    if key not in _MEASURED:
        _MEASURED[key] = _measure(device, dtype)
    return _MEASURED[key], "measured"


def _measure(device: Device, dtype: torch.dtype) -> float:
    if device.type != "cpu":
        return _gemm_flops(device, dtype, 8192)
    # Some dtypes have no fast kernel on a CPU: what a small product shows must do where a large one would take seconds.
    small = _gemm_flops(device, dtype, 128)
    return small if small < 10e9 else _gemm_flops(device, dtype, 512)


def _gemm_flops(device: Device, dtype: torch.dtype, size: int) -> float:
    """The best of a few square products, of small ones many: threads that wake up are not the device's peak."""
    a = torch.ones(size, size, dtype=dtype, device=device.torch_device)
    best = float("inf")
    tries, began = 0, time.perf_counter()
    while tries < 4 or time.perf_counter() - began < _LEAST_SECONDS:
        tries += 1
        device.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
