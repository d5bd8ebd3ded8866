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
from tests.core.checkpoint.states import SCALARS, load_on, save_on
from tests.support.ranks import RanksFailed, run_ranks


def save_and_publish(rank: int, world: int, root: Path, iteration: int, layout: str) -> None:
    save_on(rank, world, store.iteration_folder(root, iteration), layout)
    if rank == 0:
        store.publish(root, iteration)


def test_nothing_published_is_none_and_an_error_to_find(tmp_path: Path) -> None:
    assert store.latest(tmp_path) is None
    assert store.latest(tmp_path / "nowhere") is None
    assert store.checkpoints(tmp_path / "nowhere") == {}
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint that was published as latest\. No iteration is saved"
    ):
        store.find(tmp_path)


def test_latest_follows_publish_and_any_iteration_can_be_found(tmp_path: Path) -> None:
    for iteration in (100, 20):
        save_and_publish(0, 1, tmp_path, iteration, "one")
    assert store.iteration_folder(tmp_path, 20) == tmp_path / "iter_0000020"
    assert store.latest(tmp_path) == store.find(tmp_path) == tmp_path / "iter_0000020"
    assert store.find(tmp_path, 100) == tmp_path / "iter_0000100"
    assert list(store.checkpoints(tmp_path)) == [20, 100]
    with pytest.raises(CheckpointError, match=r"no checkpoint of iteration 30\. Iterations saved there: 20, 100\."):
        store.find(tmp_path, 30)


@pytest.mark.parametrize("content", [b"", b"garbage", b"iter_0000999", b"../c", b"\xff\xfe", b"iter_0000020\nmore"])
def test_a_latest_that_names_no_checkpoint_is_told_with_the_choices(tmp_path: Path, content: bytes) -> None:
    save_and_publish(0, 1, tmp_path, 20, "one")
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"which is not a checkpoint there\. Iterations saved there: 20\."):
        store.find(tmp_path)


def test_only_finished_checkpoints_can_be_published(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    with pytest.raises(CheckpointError, match="is not a finished checkpoint"):
        store.publish(tmp_path, 5)
    assert store.checkpoints(tmp_path) == {}


def kill_at(rank: int, world: int, root: Path, dying: int, phase: str) -> None:
    """Save iteration 200, and die in a phase of it."""
    from megapar.core.checkpoint import folder, shard_file, storage

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == dying:
        module, name = {
            "shard": (shard_file, "_write_tensor"),
            "scalars": (storage, "write_bytes"),
            "manifest": (storage, "make_layout"),
            "before rename": (storage, "move_into_place"),
            "after rename": (folder, "sync_folder"),
            "latest": (os, "fsync"),
        }[phase]
        if phase == "after rename":
            kept = folder.sync_folder
            calls: list[Path] = []

            def die_second(path: Path) -> None:
                calls.append(path)
                (die if len(calls) == 2 else kept)(path)

            folder.sync_folder = die_second
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
    assert store.find(tmp_path) == tmp_path / "iter_0000100"
    assert load_on(0, 1, store.find(tmp_path), "one") == ([], SCALARS)
    assert list(store.checkpoints(tmp_path)) == ([100, 200] if finished else [100])
    if finished:  # whatever has the name of a checkpoint is a whole one
        assert load_on(0, 1, store.find(tmp_path, 200), "one") == ([], SCALARS)
    save_and_publish(0, 1, tmp_path, 200, "one")
    assert load_on(0, 1, store.find(tmp_path), "one") == ([], SCALARS)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("iter_0000200.tmp-")]


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
