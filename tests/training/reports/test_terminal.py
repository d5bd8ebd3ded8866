"""Lines of the log and the bar: when they come, what they say, and what a narrow one leaves out."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import fields, replace
from datetime import datetime

import pytest
from rich.progress import TaskID

from megapar.core import status_line
from megapar.core.units import clock_text
from megapar.training.reports.record import Record
from megapar.training.reports.terminal import EVALUATION, PlainTerminal, ProgressTerminal, describe
from megapar.training.reports.time_left import TimeLeft


def record(iteration: int, seconds: float) -> Record:
    numbers = {field.name: 0 for field in fields(Record) if field.default is field.default_factory}
    return Record(**{**numbers, "iteration": iteration, "iteration_seconds": seconds, "sent_bytes": {}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (65, "1:05"), (3723, "1:02:03"), (3 * 86400 + 4 * 3600 + 5 * 60 + 6, "3 d 04:05:06")],
)
def test_a_duration_is_short(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def run(terminal: PlainTerminal, clock: Clock, steps: range, seconds: float) -> None:
    """Steps of a second each, and their log in the end, as of a device that is ahead of its host."""
    for iteration in steps:
        clock.seconds += seconds
        terminal.stepped(iteration)
    for iteration in steps:
        terminal.log(record(iteration, seconds))
    terminal.flush()


def test_lines_of_steps_begin_with_the_time_and_end_with_the_time_left() -> None:
    out, now, clock = io.StringIO(), datetime(2026, 1, 2, 3, 4, 5).timestamp(), Clock()
    terminal = PlainTerminal(40, 10, TimeLeft(40, {}, clock=clock), out, lambda: now + clock.seconds)
    terminal.print_line("before the first step")
    run(terminal, clock, range(1, 11), 2.0)
    run(terminal, clock, range(11, 21), 4.0)
    terminal.print_message("WARNING: a word")
    first, *lines = out.getvalue().splitlines()
    assert first == "before the first step"
    assert re.match(r"2026-01-02 03:04:25 iteration 10/40 \| loss .* \| left 1:00$", lines[0])
    assert re.match(r"2026-01-02 03:05:05 iteration 20/40 \| loss .* \| left 1:01$", lines[1])
    assert lines[2] == "2026-01-02 03:05:05 WARNING: a word"


def test_the_bar_moves_with_every_step_and_prints_lines_at_log_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    bar = ProgressTerminal(40, 10, TimeLeft(40, {EVALUATION: 10}, 20, clock), 20)
    (task,) = bar._progress.tasks
    seen = []
    for iteration in range(21, 26):
        clock.seconds += 2.0
        bar.stepped(iteration)
        seen.append((task.completed, str(task.fields["left"])))
    assert seen == [(21, "-"), (22, "0:36"), (23, "0:34"), (24, "0:32"), (25, "0:30")]
    clock.seconds += 1.0
    assert str(task.fields["left"]) == "0:29"
    assert "iteration" not in capsys.readouterr().out
    run(bar, clock, range(26, 31), 2.0)
    bar.close()
    assert (task.completed, task.fields["loss"]) == (30, "0.0000")
    printed = capsys.readouterr().out
    assert "iteration 30/40" in printed
    assert "left 0:21" in printed


def test_slow_work_is_the_name_of_the_bar_or_a_line_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    out, shown = io.StringIO(), threading.Event()
    monkeypatch.setattr(status_line, "_QUICK", 0.0)
    plain = PlainTerminal(40, 10, TimeLeft(40, {}), out, lambda: datetime(2026, 1, 2, 3, 4, 5).timestamp())

    def prints(text: str) -> None:
        PlainTerminal.print_message(plain, text)
        shown.set()

    monkeypatch.setattr(plain, "print_message", prints)
    with plain.status() as status:
        status("exporting", 1, 4, "tensors")
        assert shown.wait(60)
    assert out.getvalue() == "2026-01-02 03:04:05 exporting: 1 of 4 tensors\n"
    bar = ProgressTerminal(40, 100, TimeLeft(40, {}), 0)
    names: list[str] = []
    update = bar._progress.update

    def updates(task: TaskID, **to: str) -> None:
        names.append(to["what"])
        update(task, **to)  # type: ignore[arg-type]

    monkeypatch.setattr(bar._progress, "update", updates)
    with bar.status() as status:
        status("exporting", 1, 4, "tensors")
        while not names:
            status._closed.wait(0.01)
    bar.close()
    assert names[0] == "exporting: 1 of 4 tensors"
    assert names[-1] == bar._progress.tasks[0].fields["what"] == "training"


@pytest.mark.parametrize(("steps", "said"), [(2, [2]), (10, [10]), (13, [10, 13])])
def test_the_last_step_has_its_line(steps: int, said: list[int]) -> None:
    out, clock = io.StringIO(), Clock()
    terminal = PlainTerminal(steps, 10, TimeLeft(steps, {}, clock=clock), out, clock)
    run(terminal, clock, range(1, steps + 1), 1.0)
    terminal.print_last()
    assert [int(one) for one in re.findall(r"iteration (\d+)/", out.getvalue())] == said


def test_the_parts_of_a_loss_are_said() -> None:
    line = describe(replace(record(3, 1.0), loss=2.3, lm_loss=2.0, mtp_loss=1.0, aux_loss=0.0, sop_loss=None), 8)
    assert " | loss 2.3000 | lm 2.0000 | mtp 1.0000 | aux 0.000 | " in line


@pytest.mark.parametrize(("tokens", "said"), [(0, True), (1, False)])
def test_a_step_whose_tokens_are_all_masked_says_so(tokens: int, said: bool) -> None:
    assert ("every token is masked" in describe(replace(record(3, 1.0), predicted_tokens=tokens), 8)) is said


def test_a_narrow_line_leaves_out_what_matters_least() -> None:
    full = replace(
        record(3, 1.0), loss=2.0, lm_loss=1.5, sent_bytes={"mp": 1 << 20}, predicted_tokens=1, mfu_peak="table"
    )
    wide = describe(full, 8).split(" | ")
    assert {"iteration 3/8", "lm 1.5000", "MFU 0.0 %", "peak 0.00 GiB", "sent 1.0 MiB"} < set(wide)
    for width in (60, 80, 100):
        line = describe(full, 8, width)
        assert len(line) <= width
        assert set(line.split(" | ")) < set(wide)
        assert line.startswith("iteration 3/8 | loss 2.0000 | ")
    assert "sent" not in describe(full, 8, len(" | ".join(wide)) - 1)
    assert "peak" in describe(full, 8, len(" | ".join(wide)) - 1)


def test_a_guessed_peak_gives_no_mfu_and_an_equal_loss_is_said_once() -> None:
    line = describe(replace(record(3, 1.0), loss=2.0, lm_loss=2.0, mfu_peak="measured"), 8)
    assert "MFU" not in line
    assert "lm" not in line.split()


def test_a_line_above_the_bar_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = ProgressTerminal(10, 1, TimeLeft(10, {}), 0)
    terminal.print_line("socket.cpp:100: error in [bold]/data/a:100:b")
    terminal.close()
    assert "socket.cpp:100: error in [bold]/data/a:100:b" in capsys.readouterr().out
