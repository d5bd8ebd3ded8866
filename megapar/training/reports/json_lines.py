"""The metrics file: one JSON object per step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

from megapar.files.metrics_file import EXPERTS
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record

_BLOCK_BYTES = 1 << 20


def _nothing() -> None:
    """Check nothing."""


class JsonLinesLogger(Logger):
    """Appends one object per iteration. First drops the iterations from the file that a resumed run repeats.

    Args:
        path: The file.
        first_iteration: The first iteration to log.
        check: Raises an error if the file belongs to another run by now. Called before every change of the file.
    """

    def __init__(self, path: Path, first_iteration: int, check: Callable[[], None] = _nothing) -> None:
        check()
        self._check = check
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines: list[str] = []
        self._loads: list[str] = []
        self._experts: TextIO | None = None
        self._experts_path = path.with_name(path.stem + EXPERTS)
        if first_iteration == 1:
            self._experts_path.unlink(missing_ok=True)
        for file in (path, self._experts_path):
            _drop_repeated(file, first_iteration)
        self._file = path.open("a", encoding="utf-8")

    def log(self, record: Record) -> None:
        """Keep a line until the next flush. The experts' load goes to a separate file, which only experts have."""
        self._lines.append(json.dumps(record.to_dict()) + "\n")
        if record.expert_load:
            self._loads.append(json.dumps({"iteration": record.iteration, "layers": record.expert_load}) + "\n")

    def flush(self) -> None:
        """Write the lines, and flush both files to the operating system."""
        self._check()
        lines, self._lines = self._lines, []
        loads, self._loads = self._loads, []
        self._file.writelines(lines)
        self._file.flush()
        if loads:
            self._experts = self._experts or self._experts_path.open("a", encoding="utf-8")
            self._experts.writelines(loads)
            self._experts.flush()

    def close(self) -> None:
        """Write what is left and close both files, even if closing the first one fails."""
        try:
            if self._lines:
                self.flush()
        finally:
            try:
                self._file.close()
            finally:
                if self._experts is not None:
                    self._experts.close()


def _drop_repeated(path: Path, first_iteration: int) -> None:
    """Keep only the records of iterations before the first. Also drops a line that a kill has truncated.

    Reads line by line, because the file of a long run may be larger than the memory of the host.
    """
    if not path.is_file():
        return
    whole = 0
    with path.open("rb") as file:
        for line in file:
            if not _is_before(line, first_iteration):
                break
            whole += len(line)
        else:
            return
        rest = [line for line in file if _is_before(line, first_iteration)]
    path = path.resolve()
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with path.open("rb") as source, temporary.open("wb") as target:
            _copy(source, target, whole)
            target.writelines(rest)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _is_before(line: bytes, first_iteration: int) -> bool:
    """Return True for a whole line with the record of an iteration before ``first_iteration``."""
    try:
        return line.endswith(b"\n") and float(json.loads(line)["iteration"]) < first_iteration
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size > 0:
        block = source.read(min(size, _BLOCK_BYTES))
        if not block:
            return
        target.write(block)
        size -= len(block)
