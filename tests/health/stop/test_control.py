"""How a rank takes signals: the first asks, few end it, and a main thread that is stuck ends by its time."""

from __future__ import annotations

import signal
import subprocess

import pytest

from megapar.errors import DistributedError
from megapar.launch_environment import stop_timeout
from tests.support.process import STICK, finish, read_until, start

RANK = (
    "import os, signal, threading\n"
    "from megapar.health.stop import signal_listener as listener\n"
    "from megapar.health.stop.control import StopSignal\n"
    f"{STICK}"
    "listener.AGAIN_SECONDS = float(os.environ.get('AGAIN', '5'))\n"
    "stop = StopSignal()\n"
    "stop.install()\n"
    "print('ready', flush=True)\n"
)
SAVES = "while not stop.poll(): signal.pause()\nprint('asked', flush=True); input(); print(stop.poll())"
# Standard error is a pipe that is full, as behind a pager.
NOT_READ = """
import sys
from megapar.training.reports.streams import guard_streams
reader, writer = os.pipe()
os.set_blocking(writer, False)
for size in (1 << 16, 1):
    try:
        while True: os.write(writer, bytes(size))
    except BlockingIOError: pass
os.set_blocking(writer, True)
os.dup2(writer, 2)
guard_streams()
print('full', flush=True)
"""
GROUPS = [
    ("SIGTERM", "SIGTERM", "SIGTERM"),
    ("SIGUSR1", "SIGTERM", "SIGHUP"),
    ("SIGINT", "SIGTERM", "SIGINT"),
    ("SIGQUIT", "SIGINT", "SIGTERM"),
    ("SIGHUP", "SIGUSR1", "SIGTERM"),
]


@pytest.mark.parametrize("numbers", GROUPS)
def test_a_rank_that_is_told_by_several_at_once_saves(numbers: tuple[str, ...]) -> None:
    process = start(RANK + SAVES, stdin=-1)
    read_until(process, "ready")
    process.send_signal(signal.Signals[numbers[0]])
    read_until(process, "asked")
    for name in numbers[1:]:
        process.send_signal(signal.Signals[name])
    out, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, f"{int(signal.Signals[numbers[0]])}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_who_insists_ends_a_rank_that_is_stuck(number: signal.Signals) -> None:
    process = start(f"{RANK}stick()", environ={"AGAIN": "0"})
    read_until(process, "stuck")
    process.send_signal(number)
    status, out = finish(process)
    assert status == 1
    assert f"rank 0: {number.name} again" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_main_thread_that_is_stuck_ends_by_the_time_out(number: signal.Signals) -> None:
    process = start(f"{RANK}stick()", environ={"AGAIN": "0", "MEGAPAR_STOP_TIMEOUT": "0.3"})
    read_until(process, "stuck")
    process.send_signal(number)
    process.send_signal(number)
    status, out = finish(process)
    assert status == 1
    assert f"asked to stop by {number.name} 0.3 s ago (--stop-timeout), and stuck since" in out
    assert "in stick" in out


def test_a_reader_of_standard_error_that_stands_still_keeps_nobody_from_ending() -> None:
    """Neither the main thread, which is stuck, nor what reads the last words lets the rank go on."""
    process = start(f"{RANK}{NOT_READ}stick()", environ={"MEGAPAR_STOP_TIMEOUT": "0.1"})
    read_until(process, "stuck")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 1


def test_who_insists_ends_a_rank_that_waits_for_its_reader() -> None:
    process = start(f"{RANK}{NOT_READ}sys.stderr.write('never read')", environ={"AGAIN": "0"})
    read_until(process, "full")
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 1


def test_a_rank_that_saves_is_not_ended_by_its_own_time_out() -> None:
    process = start(RANK + SAVES, environ={"MEGAPAR_STOP_TIMEOUT": "0.05"}, stdin=-1)
    read_until(process, "ready")
    process.send_signal(signal.SIGTERM)
    read_until(process, "asked")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    out, _ = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, "15\n")


def test_a_rank_in_a_first_step_without_end_is_ended() -> None:
    """There is nothing to save yet, though the main thread returns from C code all the time."""
    process = start(f"{RANK}while True: signal.pause()", environ={"MEGAPAR_STOP_TIMEOUT": "0.1"}, stdin=-1)
    read_until(process, "ready")
    process.send_signal(signal.SIGTERM)
    status, out = finish(process)
    assert status == 1
    assert "asked to stop by SIGTERM 0.1 s ago" in out


def test_a_time_out_that_is_no_number_is_refused() -> None:
    assert stop_timeout({}) == 300.0
    for said in ("soon", "nan", "-1", "inf"):
        with pytest.raises(DistributedError, match=f"MEGAPAR_STOP_TIMEOUT must be .* got {said}"):
            stop_timeout({"MEGAPAR_STOP_TIMEOUT": said})
