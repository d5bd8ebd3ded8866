"""Memory of jobs that have ended is given back, that of the living is not, whoever can see them or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megapar.checkpoints.ownership import local_owner
from megapar.checkpoints.ownership.local_owner import PATIENCE_SECONDS, LocalOwner, private_folder
from megapar.errors import TrainingError
from megapar.health.stop.process import Process

CHILD = """
import sys
from pathlib import Path
from megapar.checkpoints.ownership.local_owner import LocalOwner
root = Path(sys.argv[1])
owner = LocalOwner(root, root / "theirs", "x")
print("there", flush=True)
sys.stdin.read()
"""


def note(root: Path, launcher: Process) -> Path:
    """A job whose ranks are gone, and of whose launcher this is known."""
    job = root / "theirs"
    (job / "iter_0000005").mkdir(parents=True)
    (job / "owner-0123456789ab.json").write_text(json.dumps({"launch": "x", "launcher": launcher.to_json()}))
    return job


@pytest.mark.parametrize(
    ("launcher", "stays"),
    [
        ({}, True),  # it is starting its ranks again
        ({"started": 1}, False),
        ({"pid": 2**30}, False),
        ({"boot": "b", "pid": 2**30}, True),
        ({"namespace": 7, "pid": 1}, True),  # PID 1 of another container is not this one's
    ],
)
def test_a_job_without_ranks_lives_while_its_launcher_may(
    tmp_path: Path, launcher: dict[str, Any], stays: bool
) -> None:
    job = note(tmp_path, replace(Process.here(), **launcher))
    LocalOwner(tmp_path, tmp_path / "ours", "y").release()
    assert job.exists() is stays


def test_a_job_in_another_container_lives_while_a_rank_does(tmp_path: Path) -> None:
    """Its ranks hold locks, whatever their numbers are here."""
    line = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "there\n"
        for claim in (tmp_path / "theirs").glob("owner-*"):
            content = json.loads(claim.read_text())
            content["launcher"] |= {"started": 1}
            claim.write_text(json.dumps(content))
        ours = LocalOwner(tmp_path, tmp_path / "ours", "y")
        assert (tmp_path / "theirs").exists()
        child.communicate("")
        ours.remove_orphans()
        assert not (tmp_path / "theirs").exists()


def test_a_job_that_cannot_be_seen_is_watched_for_ten_minutes(tmp_path: Path) -> None:
    job, now = note(tmp_path, replace(Process.here(), namespace=7)), [0.0]
    ours = LocalOwner(tmp_path, tmp_path / "ours", "y", lambda: now[0])
    now[0] = PATIENCE_SECONDS - 1
    (job / "iter_0000010").mkdir()  # something happens there
    ours.remove_orphans()
    now[0] += PATIENCE_SECONDS - 1
    ours.remove_orphans()
    assert job.exists()
    now[0] += 1
    ours.remove_orphans()
    assert not job.exists()


def test_a_restart_takes_the_place_of_its_own_ranks(tmp_path: Path) -> None:
    first = LocalOwner(tmp_path, tmp_path / "job", "x")
    first.release()
    LocalOwner(tmp_path, tmp_path / "job", "x")
    assert len(list((tmp_path / "job").glob("owner-*"))) == 1


def test_another_living_run_of_the_same_name_is_refused(tmp_path: Path) -> None:
    first = LocalOwner(tmp_path, tmp_path / "job", "x")
    with pytest.raises(TrainingError, match="another run with the same name of its job"):
        LocalOwner(tmp_path, tmp_path / "job", "y")
    first.release()
    LocalOwner(tmp_path, tmp_path / "job", "y")  # such as the same job, started again by hand


def test_what_is_no_job_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "somebody's")
    LocalOwner(tmp_path, tmp_path / "ours", "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "ours", "somebody's"]


@pytest.mark.parametrize("name", ["owner-manual.txt", "owner-4711", "owner-0123456789ab.json", "owner-0123456789ab"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"launch": "x", "launcher": {}}'])
def test_claims_that_nobody_understands_are_strangers(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / name).write_text(content)
    now = [0.0]
    ours = LocalOwner(tmp_path, tmp_path / "ours", "y", lambda: now[0])
    now[0] = 9 * PATIENCE_SECONDS
    ours.remove_orphans()
    assert (tmp_path / "thesis" / name).exists()


def test_files_of_others_outlast_the_job_around_them(tmp_path: Path) -> None:
    job = note(tmp_path, replace(Process.here(), started=1))
    for path in (job / "iter_0000005" / "rank-00000.json", job / "corruption.json", job / "data.bin", job / "iter_x"):
        path.touch()
    LocalOwner(tmp_path, tmp_path / "ours", "y")
    assert sorted(path.name for path in job.iterdir()) == ["data.bin", "iter_x"]


def test_a_folder_of_somebody_else_is_no_job_of_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir(0o755)
    (tmp_path / "thesis" / "data.bin").touch()
    with pytest.raises(TrainingError, match=r"thesis contains data\.bin"):
        LocalOwner(tmp_path, tmp_path / "thesis", "y")
    assert (tmp_path / "thesis").stat().st_mode & 0o777 == 0o755


def test_a_folder_of_ones_own_is_nobody_elses(tmp_path: Path) -> None:
    private_folder(tmp_path / "new", mine=True)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide").chmod(0o777)
    private_folder(tmp_path / "wide", mine=True)
    assert (tmp_path / "wide").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "wide")
    with pytest.raises(TrainingError, match="is a link, not a folder of user"):
        private_folder(tmp_path / "link", mine=True)
    private_folder(tmp_path / "link", mine=False)
    with (
        patch.object(local_owner.os, "getuid", return_value=os.getuid() + 1),
        pytest.raises(TrainingError, match=r"is user \d+'s, not a folder of user"),
    ):
        private_folder(tmp_path / "wide", mine=True)
