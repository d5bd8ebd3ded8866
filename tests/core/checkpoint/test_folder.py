"""Which folder is a checkpoint, which one is the latest, and what a killed save leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megapar.core.checkpoint import store
from megapar.errors import CheckpointError
from megapar.files.location import Location, Place, at
from tests.core.checkpoint.states import SCALARS, load_on, save_on
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.stores import names, put


def save_and_publish(rank: int, world: int, root: Place, iteration: int, layout: str) -> None:
    save_on(rank, world, store.iteration_folder(root, iteration), layout)
    if rank == 0:
        store.publish(root, iteration)


def test_nothing_published_is_none_and_an_error_to_find(store_root: Location) -> None:
    assert store.latest(store_root) is None
    assert store.latest(store_root / "nowhere") is None
    assert store.checkpoints(store_root / "nowhere") == {}
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint that was published as latest\. No iteration is saved"
    ):
        store.find(store_root)


def test_latest_follows_publish_and_any_iteration_can_be_found(store_root: Location) -> None:
    for iteration in (100, 20):
        save_and_publish(0, 1, store_root, iteration, "one")
    assert store.iteration_folder(store_root, 20) == store_root / "iter_0000020"
    assert store.latest(store_root) == store.find(store_root) == store_root / "iter_0000020"
    assert store.find(store_root, 100) == store_root / "iter_0000100"
    assert list(store.checkpoints(store_root)) == [20, 100]
    with pytest.raises(CheckpointError, match=r"no checkpoint of iteration 30\. Iterations saved there: 20, 100\."):
        store.find(store_root, 30)


@pytest.mark.parametrize("content", [b"", b"garbage", b"iter_0000999", b"../c", b"\xff\xfe", b"iter_0000020\nmore"])
def test_a_latest_that_names_no_checkpoint_is_told_with_the_choices(store_root: Location, content: bytes) -> None:
    save_and_publish(0, 1, store_root, 20, "one")
    put(store_root / "latest", content)
    with pytest.raises(CheckpointError, match=r"which is not a checkpoint there\. Iterations saved there: 20\."):
        store.find(store_root)


def test_only_finished_checkpoints_can_be_published(store_root: Location) -> None:
    put(store_root / "iter_0000005" / "scalars.json", b"{}")
    with pytest.raises(CheckpointError, match="is not a finished checkpoint"):
        store.publish(store_root, 5)
    assert store.checkpoints(store_root) == {}


def kill_at(rank: int, world: int, root: Path, dying: int, phase: str) -> None:
    """Save iteration 200, and die in a phase of it."""
    from megapar.core.checkpoint import shard_file, storage
    from megapar.files import disk

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == dying:
        module, name = {
            "shard": (shard_file, "_write_tensor"),
            "scalars": (storage, "write_bytes"),
            "manifest": (storage, "make_layout"),
            "before rename": (storage, "move_into_place"),
            "after rename": (disk, "sync_folder"),
            "latest": (os, "fsync"),
        }[phase]
        if phase == "after rename":
            kept = disk.sync_folder
            calls: list[Path] = []

            def die_second(path: Path) -> None:
                calls.append(path)
                (die if len(calls) == 2 else kept)(path)

            disk.sync_folder = die_second
        elif phase == "latest":
            save_on(rank, world, store.iteration_folder(root, 200), "rows")
            os.fsync = die  # type: ignore[assignment]
            store.publish(root, 200)
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
    assert store.find(tmp_path) == at(tmp_path) / "iter_0000100"
    assert load_on(0, 1, store.find(tmp_path), "one") == ([], SCALARS)
    assert list(store.checkpoints(tmp_path)) == ([100, 200] if finished else [100])
    if finished:  # whatever has the name of a checkpoint is a whole one
        assert load_on(0, 1, store.find(tmp_path, 200), "one") == ([], SCALARS)
    save_and_publish(0, 1, tmp_path, 200, "one")
    assert load_on(0, 1, store.find(tmp_path), "one") == ([], SCALARS)
    assert not [name for name in names(at(tmp_path)) if name.startswith("iter_0000200.tmp-")]


AS_ANOTHER = """
import os, sys
from pathlib import Path
from megapar.core.checkpoint import layout
from megapar.core.checkpoint.folder import candidates
from megapar.errors import CheckpointError
root = Path(sys.argv[1])
layout.torch  # imported before the rights are given up
os.seteuid(65534)
print([path.name for path in candidates(root)[0]])
for place in (root / "iter_0000002", root.parent / "closed"):
    try:
        layout.read(place) if place.name != "closed" else candidates(place)
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
