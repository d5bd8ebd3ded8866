"""Clocks of the GPU beside the findings: a driver that is asked from a thread, and one that is missing."""

from __future__ import annotations

import sys
import time
import types
from contextlib import nullcontext

import pytest

from scripts.gpu_day import clock, clocks
from scripts.gpu_day.day import Answer, Day, Findings


def day_of(folder, device="cpu"):
    findings = Findings(folder / "findings.jsonl", {"device": device, "small": True, "commit": "tried"})
    return Day("tried", device, True, folder, time.monotonic() + 100, findings)


def lines_of(day):
    return {what: line for (_, what), line in day.findings.read().items()}


class FakeDriver(types.ModuleType):
    """A driver whose clock falls, at its power limit, once it has been asked five times."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = 1, 2, 0, 186
    NVMLError = RuntimeError

    def __init__(self, power_now=True):
        super().__init__("pynvml")
        self.asked, self.power_now = 0, power_now

    def nvmlInit(self):
        self.asked = 0

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        self.asked += kind == self.NVML_CLOCK_SM
        return 2619 if kind == self.NVML_CLOCK_MEM else 1980 if self.asked <= 5 else 1500

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 650_000

    def nvmlDeviceGetFieldValues(self, gpu, names):
        if not self.power_now:
            raise RuntimeError("not supported")
        value = types.SimpleNamespace(uiVal=700_000)
        return [types.SimpleNamespace(nvmlReturn=0, value=value) for _ in names]

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        return 60

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return 0 if self.asked <= 5 else 0x4 | 0x40


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", made := FakeDriver())
    monkeypatch.setattr(clocks, "INTERVAL", 0.001)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def until_asked(driver, times):
    until = time.monotonic() + 20
    while driver.asked < times and time.monotonic() < until:
        time.sleep(0.001)


def test_an_attempt_on_a_gpu_has_its_clocks(driver, tmp_path):
    day = day_of(tmp_path, "cuda")
    day.attempt("some", lambda: until_asked(driver, 20) or Answer(None, {}))
    found = lines_of(day)["some"]["clocks"]
    assert found["samples"] >= 15
    assert found["sm_mhz"][0] == 1500
    assert found["sm_mhz"][2] == 1980
    assert (found["memory_mhz"], found["watts"], found["celsius"]) == ([2619] * 3, [700.0] * 3, 60)
    assert set(found["reasons"]) == {"power cap", "temperature (hardware)"}
    assert 0.5 < found["reasons"]["power cap"] < 1


def test_samples_are_found_by_their_time(driver):
    with clocks.sampled(True) as found:
        until_asked(driver, 8)
    first, last = found.samples[0], found.samples[-1]
    assert found.between(first.at, first.at) == [first]
    assert found.between(last.at + 1, last.at + 2) == []
    assert clocks.summary([]) == {}


def test_a_driver_without_the_power_of_the_moment_gives_its_mean(driver):
    driver.power_now = False
    assert clocks.Driver().sample().watts == 650.0


def test_without_a_driver_an_attempt_has_no_clocks(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with clocks.sampled(True) as found:
        assert "pynvml" in found.lacks
    day = day_of(tmp_path, "cuda")
    day.attempt("some", lambda: Answer(True, {}))
    assert lines_of(day)["some"]["ok"]
    assert "clocks" not in lines_of(day)["some"]


def test_a_driver_that_fails_later_ends_the_samples(driver, monkeypatch):
    monkeypatch.setattr(driver, "nvmlDeviceGetTemperature", lambda *_: 1 // (driver.asked < 4))
    with clocks.sampled(True) as found:
        until = time.monotonic() + 20
        while not found.lacks and time.monotonic() < until:
            time.sleep(0.001)
    assert "ZeroDivisionError" in found.lacks
    assert len(found.samples) == 2  # after the first one, which only tries the driver


def test_slow_steps_are_numbered(tmp_path, monkeypatch):
    now = iter([0.0, 9.0, 10.0, 11.0, 20.0, 21.0, 30.0, 32.0, 40.0, 41.0])
    step = types.SimpleNamespace(monitor=types.SimpleNamespace(add=lambda _: None), step=lambda: None)
    monkeypatch.setattr(clock, "trainer", lambda *_: nullcontext(step))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    figures = clock.steps(day_of(tmp_path)).figures
    assert figures["seconds"] == [9.0, 1.0, 1.0, 2.0, 1.0]
    assert figures["slow_steps"] == [4]
