"""Which folder is a checkpoint, which one is the latest, and what a killed save leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path, PurePath
from typing import Any
from unittest.mock import patch

import pytest

from megapar.checkpoints.format import shards
from megapar.checkpoints.format.faults import RECORD
from megapar.checkpoints.save_load import collective_io, storage
from megapar.checkpoints.save_load import folder as folders
from megapar.checkpoints.save_load.folder import file_fault, set_aside
from megapar.errors import CheckpointError
from megapar.files import disk
from megapar.files.location import Location, Place, at
from tests.checkpoints.save_load.states import SCALARS, load_on, save_on
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.stores import names, put


def save_and_publish(rank: int, world: int, root: Place, iteration: int, layout: str) -> None:
    save_on(rank, world, folders.iteration_folder(root, iteration), layout)
    if rank == 0:
        folders.publish(root, iteration)


def test_nothing_published_is_none_and_an_error_to_find(store_root: Location) -> None:
    assert folders.latest(store_root) is None
    assert folders.latest(store_root / "nowhere") is None
    assert folders.checkpoints(store_root / "nowhere") == {}
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint that was published as latest\. No iteration is saved"
    ):
        folders.find(store_root)


def test_latest_follows_publish_and_any_iteration_can_be_found(store_root: Location) -> None:
    for iteration in (100, 20):
        save_and_publish(0, 1, store_root, iteration, "one")
    assert folders.iteration_folder(store_root, 20) == store_root / "iter_0000020"
    assert folders.latest(store_root) == folders.find(store_root) == store_root / "iter_0000020"
    assert folders.find(store_root, 100) == store_root / "iter_0000100"
    assert list(folders.checkpoints(store_root)) == [20, 100]
    with pytest.raises(CheckpointError, match=r"no checkpoint of iteration 30\. Iterations saved there: 20, 100\."):
        folders.find(store_root, 30)


@pytest.mark.parametrize("content", [b"", b"garbage", b"iter_0000999", b"../c", b"\xff\xfe", b"iter_0000020\nmore"])
def test_a_latest_that_names_no_checkpoint_is_told_with_the_choices(store_root: Location, content: bytes) -> None:
    save_and_publish(0, 1, store_root, 20, "one")
    put(store_root / "latest", content)
    with pytest.raises(CheckpointError, match=r"which is not a checkpoint there\. Iterations saved there: 20\."):
        folders.find(store_root)


def test_only_finished_checkpoints_can_be_published(store_root: Location) -> None:
    put(store_root / "iter_0000005" / "scalars.json", b"{}")
    with pytest.raises(CheckpointError, match="is not a finished checkpoint"):
        folders.publish(store_root, 5)
    assert folders.checkpoints(store_root) == {}


def kill_at(rank: int, world: int, root: Path, dying: int, phase: str) -> None:
    """Save iteration 200, and die in a phase of it."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == dying:
        module, name = {
            "shard": (shards, "_write_tensor"),
            "scalars": (storage, "write_bytes"),
            "manifest": (storage, "make_layout"),
            "before rename": (collective_io, "move_into_place"),
            "after rename": (disk, "sync"),
            "latest": (os, "fsync"),
        }[phase]
        if phase == "after rename":
            kept = disk.sync
            calls: list[Path] = []

            def die_second(path: Path) -> None:
                calls.append(path)
                (die if len(calls) == 2 else kept)(path)

            disk.sync = die_second
        elif phase == "latest":
            save_on(rank, world, folders.iteration_folder(root, 200), "rows")
            os.fsync = die  # type: ignore[assignment]
            folders.publish(root, 200)
        else:
            setattr(module, name, die)
    save_and_publish(rank, world, root, 200, "rows")


@pytest.mark.parametrize(
    ("dying", "phase", "finished"),
    [
        (1, "shard", False),
        (0, "shard", False),
        (0, "scalars", False),
        (0, "manifest", False),
        (0, "before rename", False),
        (0, "after rename", True),
        (0, "latest", True),
    ],
)
def test_a_save_killed_in_any_phase_leaves_the_old_checkpoint_the_latest(
    tmp_path: Path, dying: int, phase: str, finished: bool
) -> None:
    save_and_publish(0, 1, tmp_path, 100, "one")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, kill_at, tmp_path, dying, phase)
    assert caught.value.signals[dying] == signal.SIGKILL
    assert folders.find(tmp_path) == at(tmp_path) / "iter_0000100"
    assert load_on(0, 1, folders.find(tmp_path), "one") == ([], SCALARS)
    assert list(folders.checkpoints(tmp_path)) == ([100, 200] if finished else [100])
    if finished:  # whatever has the name of a checkpoint is a whole one
        assert load_on(0, 1, folders.find(tmp_path, 200), "one") == ([], SCALARS)
    save_and_publish(0, 1, tmp_path, 200, "one")
    assert load_on(0, 1, folders.find(tmp_path), "one") == ([], SCALARS)
    assert not [name for name in names(at(tmp_path)) if name.startswith("iter_0000200.tmp-")]


AS_ANOTHER = """
import os, sys
from pathlib import Path
from megapar.checkpoints.format import layout
from megapar.checkpoints.save_load.folder import candidates
from megapar.errors import CheckpointError
root = Path(sys.argv[1])
layout.torch  # imported before the rights are given up
os.seteuid(65534)
print([path.name for path in candidates(root)[0]])
for place in (root / "iter_0000002", root.parent / "closed"):
    try:
        layout.read_layout(place) if place.name != "closed" else candidates(place)
    except CheckpointError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_what_may_not_be_read_is_told_and_does_not_hide_the_rest() -> None:
    with tempfile.TemporaryDirectory() as top:
        root, closed = Path(top) / "c", Path(top) / "closed"
        for folder in (root / "iter_0000001", root / "iter_0000002", closed):
            folder.mkdir(parents=True)
        for number in (1, 2):
            (root / f"iter_000000{number}" / "layout.json").write_text("{}")
        (root / "latest").write_text("iter_0000002\n")
        Path(top).chmod(0o755)
        (root / "iter_0000002").chmod(0o700)
        closed.chmod(0o700)
        command = [sys.executable, "-c", AS_ANOTHER, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    names, unreadable, other = done.stdout.splitlines()
    assert names == "['iter_0000002', 'iter_0000001']", done.stderr
    assert "CheckpointError" in unreadable
    assert "cannot be read: [Errno 13]" in unreadable
    assert "CheckpointError" in other
    assert "closed cannot be listed" in other


@pytest.fixture
def root(store_root: Location) -> Location:
    """Checkpoints 2, 4, 6 and 100, of which 6 is the latest; and a save under way."""
    for iteration in (100, 2, 4, 6):
        save(store_root, iteration)
    put(store_root / "iter_0000005.tmp-0123456789ab" / "scalars.json", b"")
    return store_root


def save(root: Location, iteration: int) -> None:
    """Save as runs do: in a folder with a name of its own, which is published."""
    folder = folders.iteration_folder(root, iteration)
    made = root / f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}"
    put(made / "layout.json", b"")
    made.publish(folder)
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
        file_fault(root, 7)
    assert {"corruption-0000007.json", "corruption-0000007-2.json"} <= set(names(root))
    file_fault(root, 7)


@pytest.mark.parametrize(
    ("passed", "kept"), [([-1], [6, 100]), ([5, 6], [4, 6, 100]), ([3, 5], [2, 4, 6, 100]), ([1], [6, 100])]
)
def test_the_newest_that_each_check_vouches_for_is_kept(root: Location, passed: list[int], kept: list[int]) -> None:
    folders.keep_newest(root, 100, 2, set(names(root)), None, passed)
    assert list(folders.checkpoints(root)) == kept
