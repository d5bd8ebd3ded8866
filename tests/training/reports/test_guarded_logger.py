"""Loggers that fail or hang: said once, training goes on, and of a file nothing is missing when it works again."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megapar.training.reports import guarded_logger
from megapar.training.reports.file_loggers import JsonLinesLogger
from megapar.training.reports.guarded_logger import GuardedLogger, RetriedLogger
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record
from tests.support.record import record


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


def log_two(made: GuardedLogger) -> None:
    made.start(1, {"lr": 0.1})
    for iteration in (1, 2):
        made.log(record(iteration))
        made.flush()
    made.close()


@pytest.mark.parametrize("queued", [False, True])
def test_every_call_is_passed_on_in_order(queued: bool) -> None:
    notes, said = Notes(), []
    log_two(GuardedLogger("it", notes, said.append, queued=queued))
    assert notes.calls == ["start 1 {'lr': 0.1}", "log 1", "flush", "log 2", "flush", "close"]
    assert said == []


@pytest.mark.parametrize("queued", [False, True])
def test_failures_are_said_once_and_counted(queued: bool) -> None:
    notes, said = Notes("log"), []
    made = GuardedLogger("it", notes, said.append, queued=queued)
    log_two(made)
    assert len(notes.calls) == 6
    assert said == ["WARNING: it: RuntimeError: no log. Training continues", "WARNING: it: 2 calls failed"]
    assert made.errors == 2


@pytest.mark.parametrize("queued", [False, True])
def test_one_that_cannot_start_gets_no_records(queued: bool) -> None:
    notes, said = Notes("start"), []
    log_two(GuardedLogger("it", notes, said.append, queued=queued))
    assert notes.calls == ["start 1 {'lr': 0.1}"]
    assert said == ["WARNING: it: RuntimeError: no start. Training continues"]


def test_a_logger_without_log_says_which_it_is() -> None:
    said: list[str] = []
    log_two(GuardedLogger("it", Logger(), said.append))
    assert said[0] == "WARNING: it: NotImplementedError: Logger.log. Training continues"


def test_a_network_that_hangs_holds_up_neither_a_step_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_logger, "MOST_KEPT", 5)
    answers, said = threading.Event(), []

    class Hanging(Logger):
        def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
            answers.wait()

    made = GuardedLogger("it", Hanging(), said.append, queued=True, close_seconds=0.01)
    made.start(1, {})
    for iteration in range(1, 21):
        made.log(record(iteration))
    made.close()
    answers.set()
    assert said[0] == "WARNING: it did not finish within 0.01 s"
    assert said[1] == f"WARNING: it: {made.lost} records were dropped"
    assert made.lost >= 14


@dataclass
class Line:
    """What a logger needs of a record."""

    iteration: int
    expert_load: list[Any] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}


@dataclass
class Disk:
    """A clock and a disk that may be full."""

    now: float = 0.0
    full: bool = False

    def logger(self, path: Path, first: int) -> JsonLinesLogger:
        disk = self

        class Logger(JsonLinesLogger):
            def flush(self) -> None:
                if disk.full:
                    self._file.write('{"iter')  # what a full disk took of a line
                    super().flush()
                    raise OSError(28, "No space left on device")
                super().flush()

        return Logger(path, first)


def test_nothing_is_missing_and_nothing_twice_after_a_full_disk(tmp_path: Path) -> None:
    disk, said, path = Disk(), [], tmp_path / "m.jsonl"
    logger = RetriedLogger("m.jsonl", lambda first: disk.logger(path, first), 1, said.append, lambda: disk.now)
    for iteration in range(1, 9):
        disk.full, disk.now = iteration in (3, 4, 5), disk.now + 10
        logger.log(Line(iteration))
        logger.flush()
    logger.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == list(range(1, 9))
    assert logger.errors == 3
    assert len(said) == 2
    assert said[0].startswith("WARNING: m.jsonl cannot be written: OSError: [Errno 28] No space left on device.")
    assert said[1] == "m.jsonl: written again"


def test_one_that_never_works_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, said, asked = Disk(), [], []

    def make(first: int) -> JsonLinesLogger:
        asked.append(first)
        raise PermissionError("no")

    monkeypatch.setattr(guarded_logger, "MOST_KEPT", 50)
    logger = RetriedLogger("m.jsonl", make, 1, said.append, lambda: disk.now)
    for iteration in range(1, 101):
        disk.now += 1
        logger.log(Line(iteration))
        logger.flush()
    assert len(asked) < 10
    logger.close()
    assert len(said) == 2
    assert said[1] == "WARNING: m.jsonl: 100 records were never written"
