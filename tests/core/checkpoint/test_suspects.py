"""Checkpoints are set aside by renaming, and ``latest`` never names one."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any
from unittest.mock import patch

import pytest

from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint.suspects import put_away, set_aside
from megapar.files.location import Location
from megapar.files.suspects import RECORD
from tests.support.stores import names, put


@pytest.fixture
def root(store_root: Location) -> Location:
    """Checkpoints 2, 4, 6 and 100, of which 6 is the latest; and a save under way."""
    for iteration in (100, 2, 4, 6):
        save(store_root, iteration)
    put(store_root / "iter_0000005.tmp-0123456789ab" / "scalars.json", b"")
    return store_root


def save(root: Location, iteration: int) -> None:
    put(folders.iteration_folder(root, iteration) / "layout.json", b"")
    folders.publish(root, iteration)


def test_those_between_the_last_pass_and_the_fault_are_renamed(root: Location) -> None:
    assert [path.name for path in set_aside(root, 2, 6, None)] == ["iter_0000004.suspect", "iter_0000006.suspect"]
    assert folders.latest(root) == root / "iter_0000002"
    assert list(folders.checkpoints(root)) == [2, 100]
    assert folders.find(root, 4) == root / "iter_0000004.suspect"
    assert set_aside(root, 2, 6, None) == []


def test_without_an_older_one_there_is_no_latest(root: Location) -> None:
    set_aside(root, 0, 6, None)
    assert folders.latest(root) is None
    assert list(folders.checkpoints(root)) == [100]


def test_nothing_is_replaced(root: Location) -> None:
    set_aside(root, 3, 4, None)
    save(root, 4)
    assert folders.find(root, 4) == root / "iter_0000004"
    assert [path.name for path in set_aside(root, 3, 4, None)] == ["iter_0000004.suspect-2"]
    assert "iter_0000004.suspect" in names(root)
    assert folders.find(root, 4) == root / "iter_0000004.suspect-2"


def test_a_start_that_was_killed_in_between_is_gone_on_with(root: Location) -> None:
    kept = type(root.store).publish

    def publish(self: Any, made: PurePath, path: PurePath, *, replace: bool = False) -> None:
        if made.name == "iter_0000006":
            raise KeyboardInterrupt
        kept(self, made, path, replace=replace)

    with patch.object(type(root.store), "publish", publish), pytest.raises(KeyboardInterrupt):
        set_aside(root, 2, 6, None)
    assert folders.latest(root) == root / "iter_0000002"
    set_aside(root, 2, 6, None)
    assert list(folders.checkpoints(root)) == [2, 100]


def test_records_are_kept(root: Location) -> None:
    for _ in range(2):
        put(root / RECORD, b"{}")
        put_away(root, 7)
    assert {"corruption-0000007.json", "corruption-0000007-2.json"} <= set(names(root))
    put_away(root, 7)


@pytest.mark.parametrize(
    ("passed", "kept"), [([-1], [6, 100]), ([5, 6], [4, 6, 100]), ([3, 5], [2, 4, 6, 100]), ([1], [6, 100])]
)
def test_the_newest_that_each_check_vouches_for_is_kept(root: Location, passed: list[int], kept: list[int]) -> None:
    folders.keep_newest(root, 100, 2, set(names(root)), None, passed)
    assert list(folders.checkpoints(root)) == kept
