"""Loggers of records: a JSON lines file, TensorBoard, the terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from megapar.training.reports.record import Record
from megapar.training.reports.time_left import TimeLeft, clock_text

EXPERTS = ".experts.jsonl"


class Logger(Protocol):
    """A sink for records, on the rank that reports."""

    def log(self, record: Record) -> None:
        """Log one iteration. Called in order."""

    def flush(self) -> None:
        """Make all records so far durable and visible."""

    def close(self) -> None:
        """Close the logger at the end of the run."""


class JsonLinesLogger:
    """Appends one object per iteration. First drops the iterations from the file that a resumed run repeats."""

    def __init__(self, path: Path, first_iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._experts: TextIO | None = None
        self._experts_path = path.with_name(path.stem + EXPERTS)
        if first_iteration == 1:
            self._experts_path.unlink(missing_ok=True)
        for file in (path, self._experts_path):
            _drop_repeated(file, first_iteration)
        self._file = path.open("a")

    def log(self, record: Record) -> None:
        """Append a line. The experts' load goes to a separate file, which only runs with experts have."""
        self._file.write(json.dumps(record.to_dict()) + "\n")
        if record.expert_load:
            self._experts = self._experts or self._experts_path.open("a")
            self._experts.write(json.dumps({"iteration": record.iteration, "layers": record.expert_load}) + "\n")

    def flush(self) -> None:
        """Flush both files to the operating system."""
        self._file.flush()
        if self._experts is not None:
            self._experts.flush()

    def close(self) -> None:
        """Close both files, even if closing the first one fails."""
        try:
            self._file.close()
        finally:
            if self._experts is not None:
                self._experts.close()


def _drop_repeated(path: Path, first_iteration: int) -> None:
    """Keep only the records of iterations before the first. Also drops a line that a kill has truncated."""
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = "".join(line + "\n" for line in text.splitlines() if _iteration_of(line) < first_iteration)
    if kept != text:
        path = path.resolve()
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            temporary.write_text(kept, encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def _iteration_of(line: str) -> float:
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoardLogger:
    """Writes scalars, and the experts' load as percentiles per layer, to TensorBoard."""

    def __init__(self, folder: Path, first_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_iteration)

    def log(self, record: Record) -> None:
        """Add a point to every curve."""
        scalars = {
            "loss/total": record.loss,
            "loss/lm": record.lm_loss,
            "loss/sop": record.sop_loss,
            "loss/aux": record.aux_loss,
            "loss/z": record.z_loss,
            "loss/mtp": record.mtp_loss,
            "loss/sequence": record.sequence_loss,
            "loss/orthogonal": record.orthogonal_loss,
            "evaluation/loss": record.eval_loss,
            "evaluation/lm": record.eval_lm_loss,
            "evaluation/sop": record.eval_sop_loss,
            "evaluation/mtp": record.eval_mtp_loss,
            "optimizer/lr": record.lr,
            "optimizer/grad_norm": record.grad_norm,
            "speed/tokens_per_second": record.tokens_per_second,
            "speed/model_tflops_per_device": record.model_tflops_per_device,
            "speed/mfu": record.mfu,
            "speed/exposed_communication_seconds": record.exposed_communication_seconds,
            "memory/peak_bytes": record.peak_memory_bytes,
            "memory/reserved_unused_bytes": record.reserved_unused_bytes,
            "memory/allocation_retries": record.allocation_retries,
            "experts/dropped_tokens": record.dropped_tokens,
            "precision/loss_scale": record.loss_scale,
            "precision/skipped": float(record.skipped),
            "errors/logging": record.logging_errors,
            "errors/failed_saves": record.failed_saves,
            **{f"tasks/{name}": value for name, value in record.tasks.items()},
            **{f"evaluation_tasks/{name}": value for name, value in record.eval_tasks.items()},
            **{f"sent_bytes/{name}": amount for name, amount in record.sent_bytes.items()},
            **{f"exposed_seconds/{name}": seconds for name, seconds in record.exposed_seconds.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.iteration)
        for layer, percentiles in enumerate(record.expert_load):
            for name, value in percentiles.items():
                self._writer.add_scalar(f"expert_load/layer_{layer}/{name}", value, record.iteration)

    def flush(self) -> None:
        """Flush to the event file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class PlainTerminal:
    """Prints one line per log interval with the time and the time left, for files and pipes.

    ``clock`` returns seconds since the epoch.
    """

    def __init__(
        self, train_iters: int, interval: int, stream: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._train_iters = train_iters
        self._interval = interval
        self._stream = stream or sys.stdout
        self._clock = clock
        self._left = TimeLeft()
        self._newest: int | None = None

    def print_line(self, text: str) -> None:
        """Print a line without a time."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def print_message(self, text: str) -> None:
        """Print a line with the local time, other than that of an iteration."""
        self.print_line(f"{datetime.fromtimestamp(self._clock()):%Y-%m-%d %H:%M:%S} {text}")

    def log(self, record: Record) -> None:
        """Print a line every log interval, and after every evaluation."""
        self._newest = record.iteration
        self._left.measured(record.iteration_seconds)
        if record.iteration % self._interval == 0 or record.eval_loss is not None:
            left = self._left.seconds(record.iteration, self._train_iters, self._clock())
            more = "" if left is None else f" | left {clock_text(left)}"
            self.print_message(describe(record, self._train_iters) + more)

    def flush(self) -> None:
        """Flush the stream. The records since the last flush are one report for the estimate of the time left."""
        self._stream.flush()
        if self._newest is not None:
            self._left.reported(self._clock(), self._newest)
            self._newest = None

    def close(self) -> None:
        """Do nothing."""


class ProgressTerminal(PlainTerminal):
    """Shows a progress bar with loss and time left, for interactive terminals. Lines scroll above it."""

    def __init__(self, train_iters: int, interval: int, start: int) -> None:
        super().__init__(train_iters, interval)
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("training", total=train_iters, completed=start, loss="-")
        self._progress.start()

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def log(self, record: Record) -> None:
        """Advance the bar."""
        super().log(record)
        self._progress.update(self._task, completed=record.iteration, loss=f"{record.loss:.4f}")

    def close(self) -> None:
        """Stop updating the bar."""
        self._progress.stop()


def describe(record: Record, train_iters: int) -> str:
    """Format a record on one line."""
    parts = [f"iteration {record.iteration}/{train_iters}", f"loss {record.loss:.4f}", f"lm {record.lm_loss:.4f}"]
    parts += [f"sop {record.sop_loss:.4f}"] if record.sop_loss is not None else []
    parts += [f"aux {record.aux_loss:.3f}"] if record.aux_loss is not None else []
    parts += [f"dropped {record.dropped_tokens}"] if record.dropped_tokens else []
    parts += [
        f"grad norm {record.grad_norm:.3f}",
        f"lr {record.lr:.2e}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"MFU {100 * record.mfu:.1f} %",
        f"peak {record.peak_memory_bytes / 2**30:.2f} GiB",
    ]
    unused = record.reserved_unused_bytes
    parts += [f"unused {unused / 2**30:.2f} GiB"] if unused is not None else []
    parts += [f"allocation retries {record.allocation_retries}"] if record.allocation_retries else []
    parts += [f"sent {sum(record.sent_bytes.values()) / 2**20:,.1f} MiB"] if record.sent_bytes else []
    exposed = record.exposed_communication_seconds
    parts += [f"exposed {exposed:.3f} s"] if exposed else []
    parts += [f"loss scale {record.loss_scale:g}"] if record.loss_scale != 1 else []
    parts += ["skipped"] if record.skipped else []
    parts += [f"eval loss {record.eval_loss:.4f}"] if record.eval_loss is not None else []
    return " | ".join(parts)
