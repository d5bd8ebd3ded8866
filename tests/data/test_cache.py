"""Cache entries: made once by however many processes ask, whole or not there at all."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megapar.data import cache
from megapar.data.cache import cache_folder, cached_value, find_entry, hash_parts, make_once
from megapar.errors import DataError
from megapar.files import manifest


def test_an_entry_is_made_once(fresh_cache: Path) -> None:
    calls = []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_text("made")

    assert make_once("kind/entry", make).read_text() == "made"
    assert make_once("kind/entry", make) == fresh_cache / "kind/entry"
    assert len(calls) == 1


def test_a_wait_for_another_process_is_said(fresh_cache: Path) -> None:
    heard: list[str] = []
    (fresh_cache / "kind").mkdir(parents=True)
    with open(fresh_cache / "kind/.entry.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def hears(what: str, done: int, total: int, unit: str) -> None:
            heard.append(what)
            fcntl.flock(other, fcntl.LOCK_UN)

        assert make_once("kind/entry", lambda path: path.mkdir(), hears).is_dir()
    assert heard == [f"waiting for the process that makes {fresh_cache / 'kind/entry'}"]


def test_a_rank_lets_the_first_one_of_its_node_begin(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh_cache / "kind").mkdir(parents=True)
    events: list[str] = []
    with open(fresh_cache / "kind/.entry.lock", "w") as first:

        def sleep(seconds: float) -> None:
            if not events:
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no other process has it
                events.append("the first rank begins")

        def hears(what: str, done: int, total: int, unit: str) -> None:
            events.append("the other waits")
            fcntl.flock(first, fcntl.LOCK_UN)

        def makes(path: Path) -> None:
            events.append("the other makes it")
            path.mkdir()

        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setenv("LOCAL_RANK", "1")
        make_once("kind/entry", makes, hears)
        assert events == ["the first rank begins", "the other waits", "the other makes it"]
        monkeypatch.setenv("LOCAL_RANK", "0")
        make_once("kind/another", lambda path: path.mkdir())
    assert len(events) == 3


def test_a_failure_leaves_nothing_and_passes_on(fresh_cache: Path) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("half")
        raise DataError("broken input")

    with pytest.raises(DataError, match="broken input"):
        make_once("kind/entry", fail)
    assert [path.name for path in (fresh_cache / "kind").iterdir()] == [".entry.lock"]
    assert make_once("kind/entry", lambda path: path.mkdir()).is_dir()


def test_a_missing_source_is_not_blamed_on_the_cache(fresh_cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_once("entry", lambda path: open("/nowhere/at/all").close())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        make_once("entry", lambda path: path.mkdir())


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "megapar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "megapar"


def test_a_digest_tells_where_parts_end() -> None:
    assert hash_parts("ab", "c") != hash_parts("a", "bc")
    assert hash_parts("ab", b"c") == hash_parts(b"ab", "c")


def _ask(log: Path) -> None:
    def make(path: Path) -> None:
        path.mkdir()
        time.sleep(0.3)
        (path / "content").write_text("x" * 1000)
        with open(log, "a") as out:
            out.write(f"{os.getpid()}\n")

    assert (make_once("slow", make) / "content").read_text() == "x" * 1000


def test_processes_that_ask_at_once_get_one_entry(fresh_cache: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_ask, args=(tmp_path / "log",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len((tmp_path / "log").read_text().split()) == 1


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "content").write_text("x" * 100)


def _file(path: Path) -> None:
    path.write_text("x" * 100)


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "zeros": _zeros,
    "cut": lambda path: os.truncate(path, 50),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_text("x" * 101),
}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("make", [_folder, _file])
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_made_again_and_reported(
    kind: str,
    make: Callable[[Path], None],
    small: bool,
    fresh_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not small:
        monkeypatch.setattr(cache, "_NOT_SYNCED_BYTES", 10)
    path = make_once("kind/entry", make)
    assert find_entry("kind/entry") == path
    DAMAGE[kind](path / "content" if path.is_dir() else path)
    assert find_entry("kind/entry") is None
    make_once("kind/entry", make)
    assert (path / "content" if path.is_dir() else path).read_text() == "x" * 100
    assert len(caplog.messages) == 1
    assert f"the cache entry {path} is damaged" in caplog.messages[0]
    assert find_entry("kind/entry") == path


def test_an_entry_of_another_name_or_without_a_manifest_is_made_again(
    fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = make_once("kind/one", _folder)
    shutil.copytree(one, fresh_cache / "kind" / "other")
    make_once("kind/other", _folder)
    (one / "manifest.json").unlink()
    make_once("kind/one", _folder)
    assert "was made as kind/one" in caplog.messages[0]
    assert "has no manifest" in caplog.messages[1]
    assert make_once("kind/one", _folder) == one
    assert len(caplog.messages) == 2


def test_a_large_entry_is_not_hashed(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SMALL_BYTES", 10)
    make_once("entry", _folder)
    monkeypatch.setattr(manifest.Manifest, "wrong_content", lambda *given: pytest.fail("a large entry was hashed"))
    assert make_once("entry", _folder) == find_entry("entry")


def test_a_whole_entry_of_a_cache_that_cannot_be_written_is_taken(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_once("entry", _folder)
    (fresh_cache / ".entry.lock").unlink()
    (fresh_cache / ".entry.lock").mkdir()  # nobody opens it for writing, not even root
    assert make_once("entry", _folder) == path
    _zeros(path / "content")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        make_once("entry", _folder)


def test_an_empty_hash_makes_no_two_files_alike(fresh_cache: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")
    assert [cached_value(path, path.read_text) for path in (one, other)] == ["1", "2"]
    for entry in (fresh_cache / "hashes").iterdir():
        entry.write_text("")
    assert [cached_value(path, path.read_text) for path in (one, other)] == ["1", "2"]


def test_a_file_may_have_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("a")
    assert cached_value(path, lambda: "v") == "v"
