"""What a store promises, of the disk's and of the one in memory; names on a disk, and manifests of what it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from megapar.files import disk
from megapar.files.bucket import BucketStore
from megapar.files.location import Location, at, read_locally, same_place, written_locally
from megapar.files.manifest import FILE_NAME, Manifest
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


def test_a_library_may_write_and_read_folders_below(store_root: Location) -> None:
    with written_locally(store_root / "made") as path:
        (path / "below" / "deep").mkdir(parents=True)
        (path / "below" / "deep" / "a").write_text("one")
        (path / "b").write_text("two")
    (store_root / "made").publish(store_root / "final")
    with read_locally(store_root / "final", below=True) as path:
        assert (path / "below" / "deep" / "a").read_text() == "one"
        assert (path / "b").read_text() == "two"


def no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "no hard links here")


def test_a_record_is_locked_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.os, "link", no_links)
    lock = disk.DiskStore().lock(tmp_path / "1.json", lambda locks: b"{}")
    assert lock is not None
    assert disk.DiskStore().is_locked(tmp_path / "1.json")
    lock.release()
    assert not disk.DiskStore().is_locked(tmp_path / "1.json")
    assert (tmp_path / "1.json").read_bytes() == b"{}"


def test_a_copy_that_fails_where_there_are_no_hard_links_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    put(at(tmp_path) / "made", b"content")
    monkeypatch.setattr(disk.os, "link", no_links)
    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        disk._link(tmp_path / "made", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


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
    assert record.lock(lambda known: b"other") is None
    knows = record.content() == b"1"  # an object store does not know who is alive
    assert knows or isinstance(record.store, BucketStore)
    assert record.is_locked()
    for beat in (b"0", b"1"):
        lock.renew(beat)
        assert (store_root / "owner" / "1.beat").content() == beat
    lock.release()
    assert record.is_locked() != knows
    assert names(store_root / "owner") == ["1.beat", "1.json"]


def test_only_a_disk_has_paths(store_root: Location) -> None:
    path = store_root.local_path()
    assert (path is None) == (store_root.free_bytes() is None)
    assert path is None or Path(str(store_root)) == path
    assert at(store_root) is store_root
    assert at("a/b") == at(Path("a")) / "b"


def test_a_disk_that_cannot_flush_a_name_gives_it_back(tmp_path: Path) -> None:
    root = at(tmp_path)
    put(root / "new" / "a", b"new")
    put(root / "old" / "a", b"old")
    for name in ("old", "free"):
        with (
            patch.object(disk, "sync", side_effect=[None, OSError(5, "Input/output error")]),
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


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_text(content)
    return path


@pytest.mark.parametrize("exchanged", [True, False])
def test_a_folder_takes_the_place_of_another(exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanged:
        monkeypatch.setattr(disk, "exchange", lambda one, other: False)
    new, old = folder_of(tmp_path / "new", a="new"), folder_of(tmp_path / "old", a="old", b="old")
    disk.put(new, old)
    assert {path.name: path.read_text() for path in old.iterdir()} == {"a": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_two_folders_change_names(tmp_path: Path) -> None:
    one, other = folder_of(tmp_path / "one", a="1"), folder_of(tmp_path / "other", a="2")
    if not disk.exchange(one, other):
        pytest.skip("this file system exchanges no names")
    assert [(path / "a").read_text() for path in (one, other)] == ["2", "1"]
    with pytest.raises(OSError) as raised:
        disk.exchange(one, tmp_path / "nothing")
    assert raised.value.errno == errno.ENOENT


def test_a_folder_that_cannot_be_renamed_is_back_at_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "exchange", lambda one, other: False)
    old = folder_of(tmp_path / "old", a="old")
    with pytest.raises(FileNotFoundError):
        disk.rename(tmp_path / "nothing", old)
    assert (old / "a").read_text() == "old"


def test_everything_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def sync(path: Path) -> None:
        done.append(f"sync {path.name}")

    def replace(made: Path, path: Path) -> None:
        done.append(f"rename {path.name}")
        os.rename(made, path)

    monkeypatch.setattr(disk, "sync", sync)
    monkeypatch.setattr(disk.os, "replace", replace)
    made = folder_of(tmp_path / "made", a="1", b="2")
    folder_of(made / "within", c="3")
    disk.put(made, tmp_path / "name")
    assert set(done[:5]) == {"sync a", "sync b", "sync c", "sync within", "sync made"}
    assert done[4:] == ["sync made", "rename name", f"sync {tmp_path.name}"]


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    disk.write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_manifest_knows_what_is_not_as_it_was(tmp_path: Path) -> None:
    made = folder_of(tmp_path / "made", a="aaaa", b="bb")
    manifest = Manifest.of("made", made)
    (made / FILE_NAME).write_bytes(manifest.to_bytes())
    assert Manifest.read(made / FILE_NAME) == manifest
    assert (manifest.bytes, manifest.wrong_content(made)) == (6, "")
    (made / "a").write_bytes(bytes(4))
    assert manifest.wrong_sizes(made) == ""
    assert "a does not have the SHA-256" in manifest.wrong_content(made)
    (made / "a").write_text("aaa")
    assert manifest.wrong_sizes(made) == "is damaged: a has 3 bytes instead of 4"
    (made / "a").unlink()
    assert manifest.wrong_sizes(made) == "lacks a"
    folder_of(made / "within", c="3")
    (made / "a").write_text("aaaa")
    assert "holds within/c" in manifest.wrong_sizes(made)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"name": "x"}', '{"name": "x", "files": {"a": 1}}', '{"name": 1, "files": {"a": [-1, 2]}}']
)
def test_what_is_no_manifest_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest").write_text(text)
    assert Manifest.read(tmp_path / "manifest") is None
