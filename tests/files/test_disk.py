"""Names that are given to what is on disk, and manifests that say what it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megapar.files import disk
from megapar.files.manifest import FILE_NAME, Manifest


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

    monkeypatch.setattr(disk, "sync_file", sync)
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
