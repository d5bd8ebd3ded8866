"""Loggers that break: training does not hear of it, and nothing is missing when they work again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megapar.training.reports import patient_logger
from megapar.training.reports.json_lines import JsonLinesLogger
from megapar.training.reports.patient_logger import PatientLogger


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
    logger = PatientLogger("m.jsonl", lambda first: disk.logger(path, first), 1, said.append, lambda: disk.now)
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

    monkeypatch.setattr(patient_logger, "MOST_KEPT", 50)
    logger = PatientLogger("m.jsonl", make, 1, said.append, lambda: disk.now)
    for iteration in range(1, 101):
        disk.now += 1
        logger.log(Line(iteration))
        logger.flush()
    assert len(asked) < 10
    logger.close()
    assert len(said) == 2
    assert said[1] == "WARNING: m.jsonl: 100 records were never written"
