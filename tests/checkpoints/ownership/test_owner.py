"""One owner of a folder: who is refused, who follows at once or after a while, and that a sleeper destroys nothing."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megapar.checkpoints.ownership import owner as owners
from megapar.checkpoints.ownership.owner import Owner, acquire
from megapar.checkpoints.save_load import folder as folders
from megapar.core.comm import json_messages as messages
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.grid import Grid
from megapar.errors import CheckpointError, FolderLostError, FolderOwnedError
from megapar.files import disk
from megapar.files.bucket import BucketStore
from megapar.files.location import Location, Lock, Place
from megapar.health.stop.process import Process
from tests.checkpoints.ownership.owners import Waiting, claim, save, sleep
from tests.checkpoints.save_load.states import SCALARS, load_on
from tests.support.process import wait_stopped
from tests.support.ranks import forked, run_ranks
from tests.support.stores import names, put

ELSEWHERE = replace(Process.here(), host="another", boot="another")
NEVER = 1e6  # seconds between beats


@contextmanager
def owning(root: Place, watch: Waiting | None = None, **changed: Any) -> Iterator[Owner]:
    owner = acquire(root, claim(**changed), (watch or Waiting()).watch, NEVER)
    try:
        yield owner
    finally:
        owner.release()


def test_epochs_rise_and_outlive_the_notes(store_root: Location) -> None:
    for epoch in (1, 2):
        with owning(store_root) as owner:
            assert owner.epoch == epoch
            save(owner, 2)
    assert names(store_root) == ["iter_0000002", "iter_0000002.e2", "latest", "owner"]
    assert (store_root / "latest").content() == b"iter_0000002.e2 2\n"
    (store_root / "owner").remove()
    with owning(store_root) as owner:
        assert owner.epoch == 3


def test_what_an_owner_published_is_known_until_another_publishes(store_root: Location) -> None:
    """A run that is killed before ``latest`` says so, and others that publish nothing after it."""
    with owning(store_root) as owner:
        save(owner, 2)
    with owning(store_root) as owner:
        save(owner, 4)
    put(store_root / "latest", b"iter_0000002 1\n")
    for _ in range(12):
        with owning(store_root):
            assert folders.latest(store_root) == store_root / "iter_0000004"


def test_whatever_has_the_name_stays(tmp_path: Path) -> None:
    strange = tmp_path / "iter_0000002"
    strange.mkdir()
    os.mkfifo(strange / "layout.json")
    with owning(tmp_path) as owner:
        save(owner, 2)
    assert (tmp_path / "latest").read_text() == "iter_0000002.e1 1\n"
    assert [path.name for path in strange.iterdir()] == ["layout.json"]


def test_a_run_that_resumes_tries_its_own_line_before_what_it_turned_back_from(store_root: Location) -> None:
    """The second owner went back to 2; what the first one had saved as 4 is an earlier checkpoint of another way."""
    for steps in ((2, 4), (3, 4, 5)):
        with owning(store_root) as owner:
            for step in steps:
                save(owner, step)
    tried = ["iter_0000005", "iter_0000004.e2", "iter_0000003", "iter_0000002", "iter_0000004"]
    assert [path.name for path in folders.candidates(store_root)[0]] == tried
    put(store_root / "latest", b"iter_0000004\n")  # a person says so
    assert [path.name for path in folders.candidates(store_root)[0]] == [tried[-1], *tried[2:4]]


def test_an_owner_that_is_seen_alive_is_named_at_once(store_root: Location) -> None:
    waiting = Waiting()
    with owning(store_root, process=ELSEWHERE, name="big-run") as owner:

        def pause(seconds: float) -> None:
            waiting.pause(seconds)
            owner.beat()

        watch = replace(waiting.watch, pause=pause)
        with pytest.raises(FolderOwnedError, match=r"is alive: job big-run, process \d+ on another, user u, since now"):
            acquire(store_root, claim(), watch)
    assert waiting.seconds < 1
    assert FolderOwnedError.exit_status == 2


@pytest.mark.parametrize(
    ("holder", "asks"),
    [
        ({"process": replace(Process.here(), started=1)}, {}),  # its number is another process's by now
        ({"process": ELSEWHERE, "launch": "x", "round": 1}, {"launch": "x", "round": 2}),
        ({"process": ELSEWHERE, "slurm": ("7", 0)}, {"slurm": ("7", 1)}),
    ],
)
def test_a_dead_owner_and_ones_own_past_are_followed_at_once(
    store_root: Location, holder: dict[str, Any], asks: dict[str, Any]
) -> None:
    acquire(store_root, claim(**holder), Waiting().watch, NEVER)
    waiting = Waiting()
    with owning(store_root, waiting, **asks) as owner:
        assert owner.epoch == 2
    assert waiting.seconds == 0


@pytest.mark.parametrize(
    ("holder", "asks"),
    [
        ({}, {"name": "a"}),  # the same name is not the same launch
        ({"launch": "x", "round": 1}, {"launch": "x", "round": 1}),
        ({"launch": "", "round": 1}, {"launch": "", "round": 2}),
        ({"slurm": ("7", 1)}, {"slurm": ("7", 1)}),  # two commands in one allocation
    ],
)
def test_anybody_else_is_watched_for_a_minute(
    store_root: Location, holder: dict[str, Any], asks: dict[str, Any]
) -> None:
    silent = acquire(store_root, claim(process=ELSEWHERE, **holder), Waiting().watch, NEVER)
    waiting = Waiting()
    with owning(store_root, waiting, **asks) as owner:
        assert owner.epoch == 2
        assert 60 <= waiting.seconds < 61
        assert [line.partition(" to see")[0] for line in waiting.told] == ["waiting up to 60 s"]
        with pytest.raises(FolderLostError, match="has another owner by now"):
            silent.check()
        with pytest.raises(FolderLostError):
            save(silent, 2)
        silent.beat()
        assert silent.lost
    assert names(store_root) == ["owner"]


def test_a_lock_that_is_gone_on_this_machine_makes_it_ten_seconds(tmp_path: Path) -> None:
    other = replace(Process.here(), namespace=7)  # another container
    holder = acquire(tmp_path, claim(process=other), Waiting().watch, NEVER)
    waiting = Waiting()
    holder._lock.release()
    with owning(tmp_path, waiting):
        assert 10 <= waiting.seconds < 11
    held, waiting = acquire(tmp_path, claim(process=other), Waiting().watch, NEVER), Waiting()
    with owning(tmp_path, waiting):
        assert waiting.seconds >= 60
    with patch.object(disk.fcntl, "flock", side_effect=OSError(37, "no locks")):
        acquire(tmp_path, claim(process=other), Waiting().watch, NEVER)
        waiting = Waiting()
        with owning(tmp_path, waiting):
            assert waiting.seconds >= 60
    held.release()


def test_a_note_that_nobody_understands_is_watched(tmp_path: Path) -> None:
    (tmp_path / "owner").mkdir()
    for content in ("", "{", "[]", '{"process": 3}', "null"):
        epoch = owners.newest_epoch(tmp_path) + 1
        (tmp_path / "owner" / f"{epoch}.json").write_text(content)
        waiting = Waiting()
        with owning(tmp_path, waiting) as owner:
            assert owner.epoch == epoch + 1
        assert waiting.seconds >= 60
        assert "a run without a readable record" in waiting.told[0]


def test_of_two_that_ask_at_once_one_is_the_owner(store_root: Location) -> None:
    """The other one found the same dead owner, and comes second."""
    acquire(store_root, claim(process=replace(Process.here(), started=1)), Waiting().watch, NEVER)
    create, winners = owners.create_lease, []

    def late(root: Location, lease: owners.Lease) -> Lock | None:
        if not winners:
            winners.append(0)
            winners[0] = acquire(root, claim(process=ELSEWHERE), Waiting().watch, NEVER)
        return create(root, lease)

    with patch.object(owners, "create_lease", late), owning(store_root, waiting := Waiting()) as owner:
        assert winners[0].epoch == 2
        assert owner.epoch == 3
        assert waiting.seconds >= 60  # the winner was watched like anybody


def test_a_file_system_without_links_will_do(tmp_path: Path) -> None:
    with patch.object(os, "link", side_effect=OSError(1, "no links")):
        with owning(tmp_path) as owner:
            assert owner.epoch == 1
        with owning(tmp_path) as owner:
            assert owner.epoch == 2


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "owner").write_text("")
    with pytest.raises(CheckpointError, match="cannot be owned"):
        acquire(tmp_path, claim(), Waiting().watch)


def test_notes_that_were_removed_are_made_again(store_root: Location) -> None:
    with owning(store_root) as owner:
        (store_root / "owner").remove()
        owner.check()
        owner.beat()
        locks = not isinstance(store_root.store, BucketStore)  # a record there can be lost unnoticed
        assert owners.read_lease(store_root, 1) == replace(owner.lease, locks=locks)
    assert owners.read_beat(store_root, 1) == owners.ENDED


def test_what_a_killed_start_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """A record that is still locked belongs to a run that is starting."""
    (tmp_path / "owner").mkdir()
    dead, alive, other = (tmp_path / "owner" / f"{letter * 32}.tmp" for letter in "abz")
    for path in (dead, alive, other):
        path.touch()
    with alive.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with owning(tmp_path):
            assert sorted(path.name for path in (tmp_path / "owner").glob("*.tmp")) == [alive.name, other.name]


def test_a_record_that_another_start_has_removed_is_written_again(tmp_path: Path) -> None:
    gone = [True, False]

    def link(aside: Path, path: Path) -> None:
        if gone.pop(0):
            aside.unlink()
        real(aside, path)

    real = disk._link
    with patch.object(disk, "_link", link), owning(tmp_path) as owner:
        assert owner.epoch == 1


def test_only_earlier_owners_left_overs_are_removed(store_root: Location) -> None:
    earlier = (
        "iter_0000002.tmp-0123456789ab",
        "iter_0000002.tmp-0123456789ab-e1",
        "iter_0000009.e1.tmp-0123456789ab-e1",
    )
    later = ("iter_0000002.tmp-0123456789ab-e3", "iter_0000009.tmp-0123456789ab-e2")
    with owning(store_root), owning(store_root) as owner:
        for name in (*earlier, *later):
            put(store_root / name / "scalars.json", b"")
        for name in ("latest.tmp-0123456789ab-e1", "latest.tmp-0123456789ab-e3"):
            put(store_root / name, b"")
        save(owner, 4)
    left = [name for name in names(store_root) if ".tmp-" in name]
    assert left == sorted([*later, "latest.tmp-0123456789ab-e3"])


@pytest.mark.parametrize(
    ("place", "woken", "said"),
    [
        ("rename", "first", "FolderLostError"),
        ("rename", "last", "FolderLostError"),
        ("publish", "first", "saved"),
        ("publish", "last", "saved"),
        ("own latest", "first", "saved"),
        ("own latest", "last", "FolderLostError"),
        ("latest", "first", "saved"),
        ("latest", "last", "FolderLostError"),
        ("removal", "last", "saved"),
    ],
)
def test_an_owner_that_slept_destroys_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, place: str, woken: str, said: str
) -> None:
    """woken: before its successor saves, or after."""
    out = tmp_path_factory.mktemp("sleeper") / "out"
    sleeper = forked().Process(target=sleep, args=(tmp_path, place, out), daemon=True)
    sleeper.start()

    def wake() -> list[str]:
        os.kill(sleeper.pid or 0, signal.SIGCONT)
        sleeper.join(60)
        return out.read_text().split()

    try:
        wait_stopped(sleeper.pid or 0)
        with owning(tmp_path, waiting := Waiting()) as owner:
            assert waiting.seconds >= 60
            heard = wake() if woken == "first" else []
            made = [save(owner, iteration, salt=1) for iteration in (4, 5)]
            heard = heard or wake()
            assert folders.latest(tmp_path) == made[-1]
            assert folders.checkpoints(tmp_path)[4] == made[0]
            for path in made:
                different, scalars = load_on(0, 1, path, "one")
                assert scalars == SCALARS
                assert different  # not the sleeper's values
            save(owner, 6, salt=1)
            assert (tmp_path / "latest").read_text() == "iter_0000006 2\n"
    finally:
        sleeper.kill()
        sleeper.join()
    assert heard == [said, "FolderLostError"]


TIMEOUT = 1.0  # seconds of a collective


def acquire_on(rank: int, world_size: int, rendezvous: str, root: str) -> bool:
    """Whether this rank owns a folder, whose owner is silent for longer than a collective may take."""
    world = World.start(Grid(dp=world_size), Device(), timedelta(seconds=TIMEOUT), f"file://{rendezvous}")
    group = world.axis("world").group
    with patch.object(owners, "PATIENCE_SECONDS", 3 * TIMEOUT):
        owner = owners.acquire_for_all_ranks(root, world, lambda value: messages.broadcast(value, group), lambda: [])
    world.close()
    return owner is not None


def test_ranks_wait_for_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    silent = replace(claim(), process=replace(Process.here(), host="another", boot="another"), epoch=1)
    assert owners.create_lease(tmp_path, silent) is not None
    assert run_ranks(2, acquire_on, str(tmp_path), group=False) == [True, False]
    assert owners.newest_epoch(tmp_path) == 2
