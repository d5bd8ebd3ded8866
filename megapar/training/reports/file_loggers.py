"""Loggers of files: the metrics file, one JSON object per step, and TensorBoard's event files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from megapar.files.paths import EXPERTS
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record


def _nothing() -> None:
    """Check nothing."""


class JsonLinesLogger(Logger):
    """Appends one object per iteration. First drops the iterations from the file that a resumed run repeats.

    ``check``, called before every change of the file, raises an error if it belongs to another run by now.
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
            row = {"iteration": record.iteration, "layers": record.expert_load}
            row |= {"loads": record.loads_by_layer} if record.loads_by_layer else {}
            self._loads.append(json.dumps(row) + "\n")

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
        shutil.copyfile(path, temporary)
        os.truncate(temporary, whole)
        with temporary.open("ab") as target:
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


LOSS = "loss/total"
LOADS = "moe/load_of_layers"
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Loss": {"training and held out": ["Multiline", [r"loss/(total|evaluation)$"]]},
    "Experts": {"load relative to a balanced load": ["Multiline", [r"moe/load_(min|p50|p90|max)$"]]},
    "Time": {"seconds per step": ["Multiline", [r"speed/(step|exposed)_seconds$"]]},
}
"""Cards of the tab "Custom scalars", each with the curves that it shows together."""


class TensorBoardLogger(Logger):
    """Writes every number of a record, the flags as hyper-parameters, and histograms of the experts' load.

    TensorBoard sorts its cards by name, and the names of ``Record.scalars`` are chosen so that the loss is first.
    Layers of experts share cards: four curves over all layers, and a histogram of each layer's most loaded expert.
    TensorBoard hides what earlier starts logged from ``first_iteration`` on.
    """

    def __init__(self, folder: Path, first_iteration: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_iteration)
        self._last: Record | None = None
        self._writer.add_custom_scalars(LAYOUT)
        self._writer.add_text("configuration", _table(config), first_iteration)
        events: Any = self._writer.file_writer
        plain = {n: value if isinstance(value, (bool, int, float, str)) else str(value) for n, value in config.items()}
        for summary in hparams(plain, {LOSS: 0.0}):
            events.add_summary(summary)

    def log(self, record: Record) -> None:
        """Add a point to every curve."""
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.iteration)
        self._last = record

    def flush(self) -> None:
        """Add a histogram of the experts' load, and flush to the event file."""
        last, self._last = self._last, None
        if last is not None and last.expert_load:
            import numpy as np

            loads = np.asarray([percentiles["max"] for percentiles in last.expert_load])
            self._writer.add_histogram(LOADS, loads, last.iteration)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _table(config: Mapping[str, Any]) -> str:
    """Return the configuration as a table in Markdown."""
    rows = (f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in config.items())
    return "\n".join(("| flag | value |", "|---|---|", *rows))
