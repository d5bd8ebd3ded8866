"""What a store promises, of the disk's and of the one in memory."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from megapar.files import disk
from megapar.files.location import Location, at, read_locally, same_place, written_locally
from tests.support.stores import names, put


def test_a_file_is_read_from_any_position(store_root: Location) -> None:
    put(store_root / "a", bytes(range(100)))
    with (store_root / "a").read() as file:
        assert file.seek(0, os.SEEK_END) == 100
        file.seek(40)
        assert file.read(3) == bytes((40, 41, 42))
    assert (store_root / "a").head(2) == b"\0\1"
    assert (store_root / "a").content(100) == bytes(range(100))
    with pytest.raises(OSError, match="at most 99 bytes"):
        (store_root / "a").content(99)


def test_a_file_is_written_in_blocks_and_never_over_another(store_root: Location) -> None:
    file = (store_root / "deep" / "er" / "a").write()
    for block in (b"one", b"", b"two"):
        file.write(memoryview(block))
    file.finish()
    assert (store_root / "deep" / "er" / "a").content() == b"onetwo"
    with pytest.raises(FileExistsError):
        (store_root / "deep" / "er" / "a").write()


def test_a_listing_has_sizes_of_files_alone(store_root: Location) -> None:
    put(store_root / "a", b"1234")
    put(store_root / "b" / "c", b"")
    assert store_root.list() == {"a": 4, "b": None}
    assert (store_root / "b").list() == {"c": 0}
    assert (store_root / "nowhere").list() == (store_root / "a").list() == {}
    assert [(store_root / name).is_file() for name in ("a", "b", "nowhere")] == [True, False, False]


def test_what_is_missing_is_told_by_its_error(store_root: Location) -> None:
    with pytest.raises(FileNotFoundError):
        (store_root / "a").read()
    with pytest.raises(FileNotFoundError):
        (store_root / "a").publish(store_root / "b")
    (store_root / "a").remove()


@pytest.mark.parametrize("part", ["", "in"])
def test_a_name_is_given_once_unless_it_may_be_replaced(store_root: Location, part: str) -> None:
    """part: of a folder with this file in it, instead of a file."""
    new, old = store_root / "new", store_root / "old"
    put(new / part if part else new, b"new")
    put(old / part if part else old, b"old")
    with pytest.raises(FileExistsError):
        new.publish(old)
    assert (old / part if part else old).content() == b"old"
    new.publish(old, replace=True)
    assert (old / part if part else old).content() == b"new"
    assert names(store_root) == ["old"]
    old.publish(store_root / "other")
    assert names(store_root) == ["other"]
    (store_root / "other").remove()
    assert names(store_root) == []


def test_a_name_beside_is_the_first_unused_one(store_root: Location) -> None:
    for _ in range(3):
        put(store_root / "a.json", b"")
        (store_root / "a.json").publish_beside("a-7", ".json")
    assert names(store_root) == ["a-7-2.json", "a-7-3.json", "a-7.json"]


def test_a_library_that_knows_paths_alone_writes_and_reads_a_folder(store_root: Location) -> None:
    with written_locally(store_root / "deep" / "model") as path:
        (path / "a").write_text("one")
        (path / "b").write_text("two")
    assert (store_root / "deep" / "model" / "b").content() == b"two"
    with read_locally(store_root / "deep" / "model") as path:
        assert sorted(file.read_text() for file in path.iterdir()) == ["one", "two"]


def test_a_folder_never_takes_the_name_of_a_file(store_root: Location) -> None:
    put(store_root / "folder" / "a", b"new")
    put(store_root / "file", b"old")
    with pytest.raises(OSError):
        (store_root / "folder").publish(store_root / "file", replace=True)
    with pytest.raises(OSError):
        (store_root / "file").publish(store_root / "folder", replace=True)
    assert names(store_root) == ["file", "folder"]


def test_a_record_is_created_once_and_held_until_it_is_released(store_root: Location) -> None:
    record = store_root / "owner" / "1.json"
    lock = record.lock(lambda known: b"%d" % known)
    assert lock is not None
    assert record.lock(lambda known: b"other") is None
    assert record.content() == b"1"
    assert record.is_locked()
    for beat in (b"0", b"1"):
        lock.renew(beat)
        assert (store_root / "owner" / "1.beat").content() == beat
    lock.release()
    assert not record.is_locked()
    assert names(store_root / "owner") == ["1.beat", "1.json"]


def test_only_a_disk_has_paths(store_root: Location) -> None:
    path = store_root.local_path()
    assert (path is None) == (store_root.store.free_bytes(store_root.path) is None)
    assert path is None or Path(str(store_root)) == path
    assert at(store_root) is store_root
    assert at("a/b") == at(Path("a")) / "b"


def test_a_disk_that_cannot_flush_a_name_gives_it_back(tmp_path: Path) -> None:
    root = at(tmp_path)
    put(root / "new" / "a", b"new")
    put(root / "old" / "a", b"old")
    for name in ("old", "free"):
        with (
            patch.object(disk, "sync_folder", side_effect=[None, OSError(5, "Input/output error")]),
            pytest.raises(OSError, match="Input/output error"),
        ):
            (root / "new").publish(root / name, replace=True)
        assert names(root) == ["new", "old"]
        assert (root / "old" / "a").content() == b"old"


def test_two_names_of_one_folder_are_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in ("run", "./run", tmp_path / "run", "link", at("run")):
        assert same_place(name, tmp_path / "run")
    assert not same_place("other", "run")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("loop", "a\0b"):
        assert same_place(name, name)
        assert not same_place(name, "run")
    assert not same_place(None, None)
