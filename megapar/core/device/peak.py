"""Peak FLOP/s of a device, for MFU."""

from __future__ import annotations

import time

import torch

from megapar.core.device.base import Device
from megapar.core.device.kinds import TERA, kind_called

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # products in other dtypes may use narrower ones

_LEAST_SECONDS = 0.02
_MEASURED: dict[tuple[str, torch.dtype], float] = {}  # by name: a process has one device of a kind


def peak_flops(device: Device, dtype: torch.dtype, tflops: float | None = None) -> tuple[float, str]:
    """Return the FLOP/s of the device in ``dtype`` and the source of the figure: ``flag``, ``table`` or ``measured``.

    ``tflops`` is the value of --device-tflops, or None. The measured figure is the best of a few square GEMMs on this
    machine with this process's threads.
    """
    if tflops is not None:
        return tflops * TERA, "flag"
    kind = kind_called(device.name)
    if kind is not None and kind.kernels != "cpu" and _DTYPES.get(dtype) in kind.flops:
        return kind.flops[_DTYPES[dtype]], "table"
    key = device.name, dtype
    if key not in _MEASURED:
        _MEASURED[key] = _measure(device, dtype)
    return _MEASURED[key], "measured"


def _measure(device: Device, dtype: torch.dtype) -> float:
    if device.type != "cpu":
        return _gemm_flops(device, dtype, 8192)
    if dtype in (torch.float32, torch.float64):  # on a busy machine, small ones may take a thousand times longer
        return _gemm_flops(device, dtype, 512)
    # Other dtypes may have no fast kernel on a CPU, so a large product would take seconds; a small one must be enough.
    small = _gemm_flops(device, dtype, 128)
    return small if small < 10e9 else _gemm_flops(device, dtype, 512)


def _gemm_flops(device: Device, dtype: torch.dtype, size: int) -> float:
    """Return the best of a few square products, or of many small ones, as threads that wake up are slow at first."""
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
