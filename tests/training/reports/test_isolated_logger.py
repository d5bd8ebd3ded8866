"""Loggers that fail, in the training thread and in a thread of their own: said once, and training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megapar.training.reports import background_logger
from megapar.training.reports.background_logger import BackgroundLogger
from megapar.training.reports.isolated_logger import IsolatedLogger
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record
from tests.support.record import record

Make = Callable[[str, Logger, Callable[[str], None]], "IsolatedLogger | BackgroundLogger"]


class Notes(Logger):
    """Writes down its calls. fails: names of the methods that raise."""

    def __init__(self, *fails: str) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def _note(self, name: str, text: str = "") -> None:
        self.calls.append(f"{name}{text}")
        if name in self._fails:
            raise RuntimeError(f"no {name}")

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        self._note("start", f" {first_iteration} {dict(config)}")

    def log(self, record: Record) -> None:
        self._note("log", f" {record.iteration}")

    def flush(self) -> None:
        self._note("flush")

    def close(self) -> None:
        self._note("close")


def log_two(made: IsolatedLogger | BackgroundLogger) -> None:
    made.start(1, {"lr": 0.1})
    for iteration in (1, 2):
        made.log(record(iteration))
        made.flush()
    made.close()


@pytest.mark.parametrize("make", [IsolatedLogger, BackgroundLogger])
def test_every_call_is_passed_on_in_order(make: Make) -> None:
    notes, said = Notes(), []
    log_two(make("it", notes, said.append))
    assert notes.calls == ["start 1 {'lr': 0.1}", "log 1", "flush", "log 2", "flush", "close"]
    assert said == []


@pytest.mark.parametrize("make", [IsolatedLogger, BackgroundLogger])
def test_failures_are_said_once_and_counted(make: Make) -> None:
    notes, said = Notes("log"), []
    made = make("it", notes, said.append)
    log_two(made)
    assert len(notes.calls) == 6
    assert said == ["WARNING: it: RuntimeError: no log. Training continues", "WARNING: it: 2 calls failed"]
    assert made.errors == 2


@pytest.mark.parametrize("make", [IsolatedLogger, BackgroundLogger])
def test_one_that_cannot_start_gets_no_records(make: Make) -> None:
    notes, said = Notes("start"), []
    log_two(make("it", notes, said.append))
    assert notes.calls == ["start 1 {'lr': 0.1}"]
    assert said == ["WARNING: it: RuntimeError: no start. Training continues"]


def test_a_logger_without_log_says_which_it_is() -> None:
    said: list[str] = []
    log_two(IsolatedLogger("it", Logger(), said.append))
    assert said[0] == "WARNING: it: NotImplementedError: Logger.log. Training continues"


def test_a_network_that_hangs_holds_up_neither_a_step_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_logger, "MOST_WAITING", 5)
    answers, said = threading.Event(), []

    class Hanging(Logger):
        def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
            answers.wait()

    made = BackgroundLogger("it", Hanging(), said.append, close_seconds=0.01)
    made.start(1, {})
    for iteration in range(1, 21):
        made.log(record(iteration))
    made.close()
    answers.set()
    assert said[0] == "WARNING: it did not finish within 0.01 s"
    assert said[1] == f"WARNING: it: {made.lost} records were dropped"
    assert made.lost >= 14
