"""The log of a run: lines for files and pipes, and a progress bar for interactive terminals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from megapar.arguments import Config
from megapar.core.status_line import StatusLine
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record
from megapar.training.reports.time_left import TimeLeft

TRAINING = "training"
EVALUATION, SAVE = "evaluation", "save"
"""The pauses between steps, by their sections."""


class PlainTerminal(Logger):
    """Prints a line per log interval with the time (``clock``: Unix seconds) and the time left, for files and pipes."""

    def __init__(
        self,
        train_iters: int,
        interval: int,
        left: TimeLeft,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._train_iters = train_iters
        self._interval = interval
        self._stream = stream or sys.stdout
        self._clock = clock
        self._left = left
        self._unsaid: Record | None = None

    def print_line(self, text: str) -> None:
        """Print a line without a time."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def print_message(self, text: str) -> None:
        """Print a line with the local time, other than that of an iteration."""
        self.print_line(f"{datetime.fromtimestamp(self._clock()):%Y-%m-%d %H:%M:%S} {text}")

    def log(self, record: Record) -> None:
        """Print a line every log interval, and after every evaluation."""
        self._unsaid = record
        if record.iteration % self._interval == 0 or record.eval_loss is not None:
            self.print_last()

    def print_last(self) -> None:
        """Print the line of the last step that was logged, if it has none yet."""
        if (record := self._unsaid) is not None:
            self._unsaid = None
            more = "" if self._left.seconds() is None else f" | left {self._left}"
            self.print_message(describe(record, self._train_iters, self._room() - len(more)) + more)

    def status(self) -> StatusLine:
        """Return the line of slow work between steps."""
        return StatusLine(self.print_message, rewrites=False)

    def stepped(self, iteration: int) -> None:
        """Count a step, whose numbers the device may still be computing."""
        self._left.stepped(iteration)

    def paused(self, name: str, seconds: float) -> None:
        """Count an evaluation or a save."""
        self._left.paused(name, seconds)

    def _room(self) -> int:
        """Return the characters of a line besides the time; a file or a pipe has all that a line needs."""
        return sys.maxsize

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def close(self) -> None:
        """Do nothing."""


class SilentTerminal(PlainTerminal):
    """Prints nothing: records still go to files and loggers."""

    def print_line(self, text: str) -> None:
        """Drop the line."""


class ProgressTerminal(PlainTerminal):
    """Shows a progress bar with loss and time left, for interactive terminals. Lines scroll above it.

    It moves with every step, and the time left with every redrawing, neither of which waits for the device.
    """

    def __init__(self, train_iters: int, interval: int, left: TimeLeft, start: int) -> None:
        super().__init__(train_iters, interval, left)
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.fields[what]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("left {task.fields[left]}"),
        )
        self._task = self._progress.add_task("", total=train_iters, completed=start, what=TRAINING, loss="-", left=left)
        self._progress.start()

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, emoji=False)

    def status(self) -> StatusLine:
        """Return the name of the bar as the line of slow work."""
        return StatusLine(lambda text: self._progress.update(self._task, what=text or TRAINING), rewrites=True)

    def _room(self) -> int:
        return self._progress.console.width - len("2026-01-01 00:00:00 ")

    def stepped(self, iteration: int) -> None:
        """Advance the bar."""
        super().stepped(iteration)
        self._progress.update(self._task, completed=iteration)

    def log(self, record: Record) -> None:
        """Print a line as usual, and show the loss."""
        super().log(record)
        self._progress.update(self._task, loss=f"{record.loss:.4f}")

    def close(self) -> None:
        """Stop updating the bar."""
        self._progress.stop()


def make_terminal(config: Config, rank: int, iteration: int, *, quiet: bool) -> PlainTerminal | None:
    """Return the terminal of rank 0, or None on other ranks. ``iteration`` is the last one done."""
    if rank != 0:
        return None
    iterations, interval = config.training.train_iters, config.logging.log_interval
    saves = config.checkpoint.save_interval if config.checkpoint.save else 0
    left = TimeLeft(iterations, {EVALUATION: config.training.eval_interval, SAVE: saves}, iteration)
    if quiet:
        return SilentTerminal(iterations, interval, left)
    if sys.stdout.isatty():
        return ProgressTerminal(iterations, interval, left, iteration)
    return PlainTerminal(iterations, interval, left)


def _clipped(record: Record) -> list[str]:
    if record.qk_clip_largest is None:
        return []
    return [f"largest score {record.qk_clip_largest:.1f}, {record.qk_clipped_heads} heads clipped"]


_LEAST = ("sent", "exposed", "peak", "unused", "lm", "MFU", "lr", "grad norm", "aux", "mtp", "sop")
"""What a narrow line leaves out, in this order."""


def describe(record: Record, train_iters: int, width: int = sys.maxsize) -> str:
    """Format a record on one line of at most ``width`` characters, if what it must say fits.

    The MFU of a peak that was measured at the start, as on a CPU, is in the metrics only: one short measurement is a
    guess.
    """
    parts = [f"iteration {record.iteration}/{train_iters}", f"loss {record.loss:.4f}"]
    parts += [f"lm {record.lm_loss:.4f}"] if record.lm_loss != record.loss else []
    parts += [f"sop {record.sop_loss:.4f}"] if record.sop_loss is not None else []
    parts += [f"mtp {record.mtp_loss:.4f}"] if record.mtp_loss is not None else []
    parts += [f"aux {record.aux_loss:.3f}"] if record.aux_loss is not None else []
    parts += [f"dropped {record.dropped_tokens}"] if record.dropped_tokens else []
    parts += [
        f"grad norm {record.grad_norm:.3f}",
        f"lr {record.lr:.2e}",
        *_clipped(record),
        f"{record.tokens_per_second:,.0f} tokens/s",
        *([f"MFU {100 * record.mfu:.1f} %"] if record.mfu_peak != "measured" else []),
        f"peak {record.peak_memory_bytes / 2**30:.2f} GiB",
    ]
    unused = record.reserved_unused_bytes
    parts += [f"unused {unused / 2**30:.2f} GiB"] if unused is not None else []
    parts += [f"allocation retries {record.allocation_retries}"] if record.allocation_retries else []
    parts += [f"sent {sum(record.sent_bytes.values()) / 2**20:,.1f} MiB"] if record.sent_bytes else []
    exposed = record.exposed_communication_seconds
    parts += [f"exposed {exposed:.3f} s"] if exposed else []
    parts += [f"loss scale {record.loss_scale:g}"] if record.loss_scale != 1 else []
    parts += [] if record.predicted_tokens else ["every token is masked"]
    parts += ["skipped"] if record.skipped else []
    parts += [f"eval loss {record.eval_loss:.4f}"] if record.eval_loss is not None else []
    parts += [f"eval {record.eval_bits_per_byte:.4f} bits per byte"] if record.eval_bits_per_byte is not None else []
    parts += [f"{name} {score:.4f}" for name, score in record.eval_scores.items()]
    for name in _LEAST:
        if len(" | ".join(parts)) > width:
            parts = [part for part in parts if not part.startswith(f"{name} ")]
    return " | ".join(parts)
