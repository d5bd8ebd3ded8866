"""Signals by a thread: heard where the main thread is stuck, not heard where they are ignored or a child's."""

from __future__ import annotations

import signal
import threading

import pytest

from megapar.health.stop.signal_listener import STOPS, Insistence, write_stderr
from tests.support.process import STICK, finish, read_until, start

HEARD = (
    "import os, signal, sys, threading, time\n"
    "from megapar.health.stop.signal_listener import Listener\n"
    "def hear(number):\n"
    "    print('heard', number, flush=True)\n"
    "    if number == signal.SIGTERM: os._exit(0)\n"
)
READY = "print('ready', flush=True)\n"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGQUIT, signal.SIGHUP, signal.SIGINT])
def test_a_main_thread_that_is_stuck_in_c_hears(number: signal.Signals) -> None:
    process = start(f"{HEARD}{STICK}Listener(hear).install()\nstick()")
    read_until(process, "stuck")
    process.send_signal(number)
    read_until(process, f"heard {int(number)}")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "heard 15\n")


def test_where_no_thread_can_be_started_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def full(self: threading.Thread) -> None:
        tried.append(self.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    write_stderr("to nobody")
    assert tried == ["megapar-stderr"]
    assert capfd.readouterr().err == ""


def test_what_was_ignored_stays_ignored() -> None:
    process = start(f"{HEARD}Listener(hear).install()\n{READY}threading.Event().wait()", ignored=[signal.SIGHUP])
    read_until(process, "ready")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "heard 15\n")


def test_signals_of_a_forked_child_are_its_own() -> None:
    body = (
        "child = os.fork()\n"
        "if not child: signal.pause()\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print('child', os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "threading.Event().wait(0.2); os._exit(0)\n"
    )
    assert finish(start(f"{HEARD}Listener(hear).install()\n{body}")) == (0, "child 15\nheard 10\n")


def test_a_deadline_is_told_and_handlers_come_back() -> None:
    body = (
        "heard = threading.Event()\n"
        "due = [time.monotonic() + 0.1]\n"
        "def late(number): due[0] = None; print('late', number, flush=True); heard.set()\n"
        "listener = Listener(late, due=lambda: due[0])\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "listener.install(); heard.wait(); listener.close()\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert finish(start(HEARD + body)) == (-signal.SIGTERM, "late 0\n")


def test_only_a_second_signal_that_is_typed_insists() -> None:
    for number in STOPS:
        insistence = Insistence()
        heard = [insistence.add(number, now) for now in (0.0, 0.1, 4.9, 5.0, 60.0)]
        typed = number in (signal.SIGINT, signal.SIGQUIT)
        assert heard == [False, False, False, typed, typed]
    mixed = Insistence()
    signals = [(signal.SIGTERM, 0.0), (signal.SIGINT, 20.0), (signal.SIGTERM, 26.0), (signal.SIGQUIT, 25.0)]
    assert [mixed.add(number, now) for number, now in signals] == [False, False, False, True]
