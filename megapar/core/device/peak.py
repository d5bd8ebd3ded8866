"""What a device could compute at best, for MFU."""

from __future__ import annotations

import time

import torch

from megapar.core.device.base import Device

_16_BITS = (torch.bfloat16, torch.float16)
# Dense matrix FLOP/s from the vendors' data sheets: (part of the device's name, dtypes) -> FLOP/s. First hit counts.
_TABLE: tuple[tuple[str, tuple[torch.dtype, ...], float], ...] = (
    ("B200", _16_BITS, 2250e12),
    ("H200", _16_BITS, 989e12),
    ("H20", _16_BITS, 148e12),
    ("H100 PCIe", _16_BITS, 756e12),
    ("H100", _16_BITS, 989e12),
    ("H800", _16_BITS, 989e12),
    ("A100", _16_BITS, 312e12),
    ("A800", _16_BITS, 312e12),
    ("L40S", _16_BITS, 362e12),
    ("V100", (torch.float16,), 125e12),
    ("910B", _16_BITS, 376e12),
)

_LEAST_SECONDS = 0.02
_MEASURED: dict[tuple[str, torch.dtype], float] = {}  # by name of the device: one process has one of a kind


def peak_flops(device: Device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of the device in ``dtype`` and where the figure comes from: ``table`` or ``measured``.

    Measured is the best of a few square GEMMs on this machine with this process's threads.
    """
    for name, dtypes, flops in _TABLE:
        if name in device.name and dtype in dtypes:
            return flops, "table"
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
