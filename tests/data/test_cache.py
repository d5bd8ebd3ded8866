"""Cache entries: made once by however many processes ask, whole or not there at all."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from megapar.data.cache import cache_folder, digest, made_once
from megapar.errors import DataError


def test_an_entry_is_made_once(fresh_cache: Path) -> None:
    calls = []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_text("made")

    assert made_once("kind/entry", make).read_text() == "made"
    assert made_once("kind/entry", make) == fresh_cache / "kind/entry"
    assert len(calls) == 1


def test_a_failure_leaves_nothing_and_passes_on(fresh_cache: Path) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("half")
        raise DataError("broken input")

    with pytest.raises(DataError, match="broken input"):
        made_once("kind/entry", fail)
    assert [path.name for path in (fresh_cache / "kind").iterdir()] == [".entry.lock"]
    assert made_once("kind/entry", lambda path: path.mkdir()).is_dir()


def test_a_missing_source_is_not_blamed_on_the_cache(fresh_cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        made_once("entry", lambda path: open("/nowhere/at/all").close())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        made_once("entry", lambda path: path.mkdir())


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "megapar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "megapar"


def test_a_digest_tells_where_parts_end() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab", b"c") == digest(b"ab", "c")


def _ask(log: Path) -> None:
    def make(path: Path) -> None:
        path.mkdir()
        time.sleep(0.3)
        (path / "content").write_text("x" * 1000)
        with open(log, "a") as out:
            out.write(f"{os.getpid()}\n")

    assert (made_once("slow", make) / "content").read_text() == "x" * 1000


def test_processes_that_ask_at_once_get_one_entry(fresh_cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_ask, args=(tmp_path / "log",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len((tmp_path / "log").read_text().split()) == 1
