"""Clocks, power and temperature of the GPU while something runs, sampled from its driver (nvidia-ml-py).

A GPU at its power limit lowers the clock of its multiprocessors: products become slower, copies do not.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

INTERVAL = 0.02  # seconds
# Bits of the driver's reasons for a clock below the highest one. Idle is not a limit.
REASONS = {
    0x1: "idle",
    0x2: "applications' setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display's setting",
    0x200: "board limit",
    0x400: "reliability",
}


class Sample(NamedTuple):
    """State of the GPU.

    Attributes:
        at: ``time.perf_counter()`` of the sample, in seconds.
        sm_mhz: Clock of the multiprocessors.
        memory_mhz: Clock of the memory.
        watts: Power, of this moment if the driver has that, else its mean of a second.
        celsius: Temperature.
        reasons: Bits of ``REASONS``.
    """

    at: float
    sm_mhz: int
    memory_mhz: int
    watts: float
    celsius: int
    reasons: int


@dataclass
class Clocks:
    """Samples of a period.

    Attributes:
        samples: In the order of time; empty where there is no driver to ask.
        lacks: Reason why there are none, or "".
    """

    samples: list[Sample] = field(default_factory=list)
    lacks: str = ""

    def between(self, begin: float, end: float) -> list[Sample]:
        """Return the samples of a part of the period, on ``time.perf_counter``."""
        return [sample for sample in self.samples if begin <= sample.at <= end]

    def summary(self) -> dict[str, Any]:
        """Return the summary of all samples; empty without samples."""
        return summary(self.samples)


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return [least, median, largest] of clocks and power, the highest temperature, and each reason's share."""
    if not samples:
        return {}
    found: dict[str, Any] = {"samples": len(samples)}
    for name in ("sm_mhz", "memory_mhz", "watts"):
        values = [getattr(sample, name) for sample in samples]
        found[name] = [min(values), median(values), max(values)]
    found["celsius"] = max(sample.celsius for sample in samples)
    shares = {name: sum(bool(sample.reasons & bit) for sample in samples) for bit, name in REASONS.items()}
    found["reasons"] = {name: count / len(samples) for name, count in shares.items() if count}
    return found


@contextmanager
def sampled(on_gpu: bool) -> Iterator[Clocks]:
    """Sample the GPU of this process from a thread until the block ends. Measures nothing, with a reason, elsewhere."""
    clocks, driver = Clocks(), None
    if not on_gpu:
        clocks.lacks = "the device is not a GPU"
    else:
        try:
            driver = Driver()
            driver.sample()
        except Exception as error:  # no package, no driver, or a driver that does not answer
            clocks.lacks, driver = f"{type(error).__name__}: {str(error)[:200]}", None
    if driver is None:
        yield clocks
        return
    ended = threading.Event()
    thread = threading.Thread(target=_collect, args=(driver, clocks, ended), daemon=True)
    thread.start()
    try:
        yield clocks
    finally:
        ended.set()
        thread.join(2.0)


def _collect(driver: Driver, clocks: Clocks, ended: threading.Event) -> None:
    while not ended.wait(INTERVAL):
        try:
            clocks.samples.append(driver.sample())
        except Exception as error:  # the thread must not print a traceback between findings
            clocks.lacks = f"{type(error).__name__}: {str(error)[:200]}"
            return


class Driver:
    """The driver's functions for the GPU of this process. Raises ImportError or NVMLError if it cannot be asked."""

    def __init__(self) -> None:
        # Not a typed import: the package is only on machines with a GPU.
        self._nvml = nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        by_number = first.isdigit()
        find = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
        self._gpu = find(int(first) if by_number else first)
        old = "nvmlDeviceGetCurrentClocksThrottleReasons"
        self._reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(nvml, old)
        self._has_power_now = self._power_now() is not None

    def sample(self) -> Sample:
        """Ask for everything once."""
        nvml, gpu = self._nvml, self._gpu
        watts = self._power_now() if self._has_power_now else None
        return Sample(
            time.perf_counter(),
            nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            1e-3 * nvml.nvmlDeviceGetPowerUsage(gpu) if watts is None else watts,
            nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            self._reasons(gpu),
        )

    def _power_now(self) -> float | None:
        """Return the power of this moment in watts; None if this driver only has a mean."""
        name = getattr(self._nvml, "NVML_FI_DEV_POWER_INSTANT", None)
        if name is None:
            return None
        try:
            (value,) = self._nvml.nvmlDeviceGetFieldValues(self._gpu, [name])
        except self._nvml.NVMLError:
            return None
        # Milliwatts, as an unsigned integer; the status says if this GPU lacks the field.
        return 1e-3 * float(value.value.uiVal) if value.nvmlReturn == 0 and value.value.uiVal else None
