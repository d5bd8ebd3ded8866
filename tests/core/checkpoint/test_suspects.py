"""Checkpoints are set aside by renaming, and ``latest`` never names one."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint.suspects import put_away, set_aside
from megapar.files.suspects import RECORD


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints 2, 4, 6 and 100, of which 6 is the latest; and a save under way."""
    for iteration in (100, 2, 4, 6):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000005.tmp-0123456789ab").mkdir()
    return tmp_path


def save(root: Path, iteration: int) -> None:
    folder = folders.iteration_folder(root, iteration)
    folder.mkdir()
    (folder / "layout.json").write_text("")
    folders.publish(root, iteration)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_those_between_the_last_pass_and_the_fault_are_renamed(root: Path) -> None:
    assert [path.name for path in set_aside(root, 2, 6, None)] == ["iter_0000004.suspect", "iter_0000006.suspect"]
    assert folders.latest(root) == root / "iter_0000002"
    assert list(folders.checkpoints(root)) == [2, 100]
    assert folders.find(root, 4) == root / "iter_0000004.suspect"
    assert set_aside(root, 2, 6, None) == []


def test_without_an_older_one_there_is_no_latest(root: Path) -> None:
    set_aside(root, 0, 6, None)
    assert folders.latest(root) is None
    assert list(folders.checkpoints(root)) == [100]


def test_nothing_is_replaced(root: Path) -> None:
    set_aside(root, 3, 4, None)
    save(root, 4)
    assert folders.find(root, 4) == root / "iter_0000004"
    assert [path.name for path in set_aside(root, 3, 4, None)] == ["iter_0000004.suspect-2"]
    assert "iter_0000004.suspect" in names(root)
    assert folders.find(root, 4) == root / "iter_0000004.suspect-2"


def test_a_start_that_was_killed_in_between_is_gone_on_with(root: Path) -> None:
    rename = Path.rename

    def once(self: Path, target: Path) -> Path:
        if self.name == "iter_0000006":
            raise KeyboardInterrupt
        return rename(self, target)

    with patch.object(Path, "rename", once), pytest.raises(KeyboardInterrupt):
        set_aside(root, 2, 6, None)
    assert folders.latest(root) == root / "iter_0000002"
    set_aside(root, 2, 6, None)
    assert list(folders.checkpoints(root)) == [2, 100]


def test_records_are_kept(root: Path) -> None:
    for _ in range(2):
        (root / RECORD).write_text("{}")
        put_away(root, 7)
    assert {"corruption-0000007.json", "corruption-0000007-2.json"} <= set(names(root))
    put_away(root, 7)


@pytest.mark.parametrize(
    ("passed", "kept"), [([-1], [6, 100]), ([5, 6], [4, 6, 100]), ([3, 5], [2, 4, 6, 100]), ([1], [6, 100])]
)
def test_the_newest_that_each_check_vouches_for_is_kept(root: Path, passed: list[int], kept: list[int]) -> None:
    folders.keep_newest(root, 100, 2, {path.name for path in root.iterdir()}, None, passed)
    assert list(folders.checkpoints(root)) == kept
