"""Folders that change as a whole: at every moment the old content or the new one is there."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from megapar.files.location import Place
from megapar.model.hugging_face import whole_folder
from megapar.model.hugging_face.whole_folder import written_aside
from tests.support.stores import in_memory, put


def write(folder: Place, **files: str) -> None:
    with written_aside(folder, lambda name: fnmatch(name, "model*"), "config.json") as aside:
        for name, content in files.items():
            (aside / name.replace("__", "/").replace("_", ".")).write_text(content)


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(params=["exchanged", "one by one", "in the folder of work"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an older model in it and another file."""
    path = tmp_path / "out"
    path.mkdir(mode=0o750)
    (path / "model-1").write_text("old")
    (path / "config.json").write_text("old")
    (path / "notes").write_text("stays")
    if request.param == "one by one":
        (path / "within").mkdir()
        (path / "within" / "file").write_text("stays, too")
    if request.param == "in the folder of work":
        monkeypatch.chdir(path)
    return path


def test_the_old_model_goes_and_the_rest_stays(folder: Path) -> None:
    write(folder, model="new", config_json="new")
    assert content(folder) == {"model": "new", "config.json": "new", "notes": "stays"}
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    assert folder.stat().st_mode & 0o777 == 0o750


def test_what_fails_leaves_the_folder_as_it_was(folder: Path) -> None:
    before = content(folder)
    with pytest.raises(FileNotFoundError):
        write(folder, model="half", no__such__folder="")
    assert content(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_a_folder_that_is_new_or_behind_a_link(tmp_path: Path) -> None:
    write(tmp_path / "in" / "out", model="new")
    (tmp_path / "link").symlink_to("in/out")
    write(tmp_path / "link", model="newer")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "in" / "out") == {"model": "newer"}


def test_a_folder_that_is_not_on_a_disk_changes_file_by_file() -> None:
    folder = in_memory() / "out"
    for name in ("model-1", "config.json", "notes"):
        put(folder / name, b"old")
    write(folder, model="new", config_json="new")
    assert {name: (folder / name).content() for name in folder.list()} == {
        **{"model": b"new", "config.json": b"new"},
        "notes": b"old",
    }


def test_where_the_parent_takes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_folder, "_try_to_make", lambda aside: None)
    write(tmp_path / "out", model="new", config_json="new")
    write(tmp_path / "out", config_json="newer")
    assert content(tmp_path / "out") == {"config.json": "newer"}


def test_what_a_killed_export_left_is_no_part_of_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "out" / ".unfinished").mkdir(parents=True)
    (tmp_path / "out" / ".unfinished" / "model-1").write_text("half")
    write(tmp_path / "out", config_json="new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_folders_in_a_folder_are_replaced_too(folder: Path) -> None:
    for text in ("one", "two"):
        with written_aside(folder, lambda name: False, "config.json") as aside:
            (aside / "templates").mkdir()
            (aside / "templates" / "a").write_text(text)
            (aside / "config.json").write_text(text)
        assert (folder / "templates" / "a").read_text() == text
    stored = in_memory() / "out"
    with written_aside(stored, lambda name: False, "config.json") as aside:
        (aside / "templates").mkdir()
        (aside / "templates" / "a").write_text("one")
    assert (stored / "templates" / "a").content() == b"one"
