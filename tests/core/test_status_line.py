"""Status of slow work: at once where a line is rewritten, after some seconds and seldom where lines stay."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import pytest

from megapar.core import status_line
from megapar.core.status_line import StatusLine


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "_TICK", 0.01)


class _Lines:
    """Keeps lines, and waits until there are some."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.more = threading.Condition()

    def __call__(self, text: str) -> None:
        with self.more:
            self.kept.append(text)
            self.more.notify()

    def wait(self, count: int) -> list[str]:
        with self.more:
            assert self.more.wait_for(lambda: len(self.kept) >= count, 60)
            return list(self.kept)


def test_work_without_steps_is_said_again_and_again_where_the_line_is_rewritten() -> None:
    lines = _Lines()
    with StatusLine(lines, rewrites=True) as status:
        status("training a tokenizer", 0, 0, "")
        assert set(lines.wait(3)) == {"training a tokenizer, 0:00"}
    assert lines.kept[-1] == ""  # the line is gone


def test_quick_work_says_nothing_where_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _Lines()
    with StatusLine(lines, rewrites=False) as status:
        status("encoding", 0, 3, "files")
        status._closed.wait(0.1)
        status("encoding", 3, 3, "files")
    assert lines.kept == []
    monkeypatch.setattr(status_line, "_QUICK", 0.0)
    monkeypatch.setattr(status_line, "_EVERY", 60.0)
    with StatusLine(lines, rewrites=False) as status:
        status("encoding", 1, 3, "files")
        assert lines.wait(1) == ["encoding: 1 of 3 files"]
        status("scoring", 1, 3, "rows")  # other work does not make it say more often
        status._closed.wait(0.1)
    assert lines.kept == ["encoding: 1 of 3 files"]


def test_the_time_left_follows_from_what_was_done_since_the_beginning() -> None:
    status = StatusLine(str, rewrites=False)
    status("encoding", 100, 160, "files")  # those of an earlier run
    began = status._began
    assert status.text(began + 9) == "encoding: 100 of 160 files"
    status("encoding", 112, 160, "files")
    assert status.text(began + 30) == "encoding: 112 of 160 files, left 2:00"
    status("exporting", 0, 7, "tensors")
    assert status.text(status._began + 5) == "exporting: 0 of 7 tensors"


def test_finished_work_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "_QUICK", 0.0)
    lines = _Lines()
    with StatusLine(lines, rewrites=False) as status:
        status("encoding", 3, 3, "files")
        status._closed.wait(0.1)
    assert lines.kept == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_rewrites_its_line_and_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    terminal, file = _Terminal(), io.StringIO()
    StatusLine.on(terminal)._write("a long line of words")
    StatusLine.on(file)._write("a long line of words")
    assert terminal.getvalue() == "\ra long li\x1b[K"
    assert file.getvalue() == "a long line of words\n"


def test_the_next_work_of_the_same_name_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(status_line.time, "monotonic", lambda: now[0])
    status = StatusLine(str, rewrites=False)
    status._thread = SimpleNamespace(ident=1)  # type: ignore[assignment]
    for seconds, done in ((0, 0), (3600, 100), (3601, 0), (3601, 10)):
        now[0] = seconds
        status("encoding", done, 100, "chunks")
    assert status.text(3611) == "encoding: 10 of 100 chunks, left 1:30"
