"""Waits for communication: by the clock of the host, or by events on a device."""

from __future__ import annotations

import pytest

from megapar.core.comm.accounts import WaitMeter


class Done:
    """A collective that somebody waits for."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


class Clock:
    """Timed events of a device, a second apart."""

    def __init__(self) -> None:
        self.events = 0

    def __call__(self) -> Clock.Event:
        self.events += 1
        return Clock.Event(self.events)

    class Event:
        def __init__(self, at: int) -> None:
            self.at = at

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Clock.Event) -> float:
            return 1000.0 * (other.at - self.at)


@pytest.mark.parametrize("device", [False, True])
def test_a_meter_that_is_off_waits_and_times_nothing(device):
    clock, work = Clock(), Done()
    meter = WaitMeter(clock if device else None)
    meter.on = False
    meter.wait(work, "ep/all_to_all")
    with meter.around("mp/all_reduce"):
        work.wait()
    assert (work.waited, clock.events, meter.take().seconds()) == (2, 0, {})
    meter.on = True
    meter.wait(work, "ep/all_to_all")
    assert clock.events == (2 if device else 0)
    assert list(meter.take().seconds()) == ["ep/all_to_all"]


def test_events_of_a_device_are_read_late():
    meter = WaitMeter(Clock())
    for kind in ("a", "b", "a"):
        meter.wait(Done(), kind)
    assert meter.take().seconds() == {"a": 2.0, "b": 1.0}
