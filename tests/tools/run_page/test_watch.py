"""Watching runs: a page at each change, until they have ended or Ctrl-C."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megapar.errors import Complaint, ConfigError
from megapar.files.location import Location, at
from megapar.tools.run_page.watch import DISK_SECONDS, SHARE, STORE_SECONDS, watch
from tests.support.stores import in_objects

WATCH = "megapar.tools.run_page.watch"
Looks = list[Callable[[], None]]


class Watched:
    """A watched run, whose pages and looks are counted. Between looks, what is given happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: Looks) -> None:
        self.pages: list[bool] = []
        self.waited: list[float] = []
        self.ended, self.failures, self.cost, self.now = False, list[Exception](), 0.0, 0.0
        self._looks = iter(looks)
        monkeypatch.setattr(f"{WATCH}.time.sleep", self._sleep)
        monkeypatch.setattr(f"{WATCH}.time.monotonic", lambda: self.now)

    def _sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        next(self._looks, self._interrupt)()

    @staticmethod
    def _interrupt() -> None:
        raise KeyboardInterrupt

    def write(self, live: bool) -> bool:
        if self.failures:
            raise self.failures.pop()
        self.pages.append(live)
        self.now += self.cost
        return self.ended


def append(path: Path) -> None:
    """Add a line to the metrics of a run."""
    with path.open("a") as file:
        file.write("{}\n")


def test_a_page_is_written_at_each_change_and_the_last_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append(metrics)

    def end() -> None:
        watched.ended = True
        (tmp_path / "run.json").write_text("{}")

    def page() -> None:
        (tmp_path / "report.html").write_text("the page is no change of the run")

    watched = Watched(monkeypatch, [page, lambda: append(metrics), lambda: None, end])
    watch([at(tmp_path)], watched.write)
    assert watched.pages == [True, True, True, False]
    assert watched.waited == [DISK_SECONDS] * 4


def test_ctrl_c_ends_it_with_a_page_that_does_not_reload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl")
    watched = Watched(monkeypatch, [])
    watch([at(tmp_path)], watched.write)
    assert watched.pages == [True, False]


def test_a_run_that_has_logged_nothing_is_waited_for_and_a_folder_without_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    watched = Watched(monkeypatch, [lambda: None, lambda: append(tmp_path / "metrics.jsonl")])
    watch([at(tmp_path)], watched.write)
    assert watched.pages == [True, False]
    watched.failures.append(ConfigError([Complaint("run-folder", "no run")]))
    with pytest.raises(ConfigError, match="no run"):
        watch([at(tmp_path / "missing")], watched.write)


def test_the_only_run_below_a_folder_is_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metrics = tmp_path / "checkpoints" / "metrics.jsonl"
    metrics.parent.mkdir()
    append(metrics)
    watched = Watched(monkeypatch, [lambda: append(metrics)])
    watch([at(tmp_path)], watched.write)
    assert watched.pages == [True, True, False]


def test_a_failure_is_reported_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append(metrics)

    def fail() -> None:
        append(metrics)
        watched.failures += [OSError("no space"), OSError("no space")]

    watched = Watched(monkeypatch, [fail, lambda: None, lambda: None])
    watch([at(tmp_path)], watched.write)
    assert watched.pages == [True, True, False]
    assert capsys.readouterr().err == "megapar report: no space; trying again\n"


def test_pages_that_take_long_are_written_less_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl")
    watched = Watched(monkeypatch, [])
    watched.cost = 60.0
    watch([at(tmp_path)], watched.write)
    assert watched.waited == [60.0 / SHARE]


def test_a_store_is_asked_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    run = in_objects()

    def write(name: str) -> None:
        file = (run / name).write()
        file.write(memoryview(os.urandom(8)))
        file.finish()

    def asked(folder: Location) -> dict[str, int | None]:
        return {str(folder / name): size for name, size in folder.list().items()}

    write("metrics.jsonl")
    watched = Watched(monkeypatch, [lambda: None, lambda: write("metrics.experts.jsonl")])
    watch([run], watched.write)
    assert len(asked(run)) == 2
    assert watched.pages == [True, True, False]
    assert watched.waited == [STORE_SECONDS] * 3
