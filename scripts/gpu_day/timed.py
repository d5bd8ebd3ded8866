"""Seconds of work on the current stream, by events of the device: other streams may be busy at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from scripts.gpu_day.day import Day

GB, T_FLOPS = 1e9, 1e12
WARMUP = 2
NO_GPU = "a CPU runs no kernels: the work ran once"


def seconds_each(day: Day, work: Callable[[], object], times: int = 10, warmup: int = WARMUP) -> list[float]:
    """Return the seconds of each call after warmup. The host waits for this stream only, at the end."""
    for _ in range(1 if day.small else warmup):
        work()
    times = min(times, 2) if day.small else times
    if not day.on_gpu:
        return [_host_seconds(work) for _ in range(times)]
    torch.cuda.current_stream().synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    return [1e-3 * first.elapsed_time(last) for first, last in pairwise(events)]


def median_seconds(day: Day, work: Callable[[], object], times: int = 10) -> float:
    """Return the median of ``seconds_each``."""
    return median(seconds_each(day, work, times))


def _host_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def both_ways(work: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Return a function that runs forward and backward, with a gradient that is drawn once."""
    gradient = torch.randn_like(work())
    return lambda: torch.autograd.grad(work(), inputs, gradient)


def normal(day: Day, *shape: int, dtype: torch.dtype = torch.bfloat16, differentiate: bool = False) -> Tensor:
    """Return standard normal numbers on the device."""
    return torch.randn(*shape, device=day.place, dtype=dtype).requires_grad_(differentiate)


def moved(nbytes: float, seconds: float) -> dict[str, Any]:
    """Return milliseconds and gigabytes per second."""
    return {"milliseconds": 1e3 * seconds, "gigabytes_per_second": nbytes / seconds / GB}


def computed(flops: float, seconds: float) -> dict[str, Any]:
    """Return milliseconds and TFLOP/s."""
    return {"milliseconds": 1e3 * seconds, "tflops": flops / seconds / T_FLOPS}
