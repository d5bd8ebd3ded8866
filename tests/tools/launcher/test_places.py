"""Folders where the ranks of a node meet: nobody else's, on a local disk, and gone with their owner."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.errors import DistributedError
from megapar.tools.launcher import places
from megapar.tools.launcher.places import PREFIX, RankFiles, file_system

ROOT = Path(__file__).parents[3]


def test_nobody_else_may_open_it_and_every_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = RankFiles([str(tmp_path)])
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    first = files.next()
    first.touch()
    second = files.next()
    assert (first.exists(), second.exists(), second.parent) == (False, False, files.folder)
    files.close()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_and_what_lives_stays(tmp_path: Path) -> None:
    living = RankFiles([str(tmp_path)])
    program = (
        "import os, sys; from megapar.tools.launcher.places import RankFiles\n"
        "files = RankFiles(sys.argv[1:]); files.next().touch(); os._exit(0)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60, env=environ)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    another = RankFiles([str(tmp_path)])
    assert set(tmp_path.iterdir()) == {living.folder, another.folder}


def test_a_process_that_was_forked_leaves_it_alone(tmp_path: Path) -> None:
    files = RankFiles([str(tmp_path)])
    child = os.fork()
    if child == 0:
        files.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert files.folder.exists()


def test_a_folder_that_is_not_fit_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_, shared, fit = (tmp_path / name for name in ("open", "shared", "fit"))
    for folder in (open_, shared, fit):
        folder.mkdir()
    open_.chmod(0o777)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/ {shared} nfs4 rw 0 0\nnone / ext4 rw 0 0\n")
    monkeypatch.setattr(places, "MOUNTS", mounts)
    unfit = [str(tmp_path / "nowhere"), str(open_), str(shared)]
    assert RankFiles([*unfit, str(fit)]).folder.parent == fit
    with pytest.raises(DistributedError, match=r"No such file.*lets other users rename.*is on nfs4, which is shared"):
        RankFiles(unfit)


def test_a_container_does_not_know_the_owner_of_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user namespace has one user alone, root's /tmp belongs to number 65534, as all others' folders do."""
    for name, content in (("USERS", "1000 1000 1\n"), ("OVERFLOW", "65534\n")):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(places, name, tmp_path / name)
    parent = tmp_path / "tmp"
    parent.mkdir()
    parent.chmod(0o1777)
    found = parent.stat()
    outside = os.stat_result((*found[:4], 65534, *found[5:]))
    monkeypatch.setattr(Path, "stat", lambda self, **_: outside if self == parent else found)
    assert places._unsuitable(parent) == f"{parent} belongs to user 65534"
    monkeypatch.setattr(places, "PLACES", (str(parent),))
    assert places._unsuitable(parent) == ""
    (tmp_path / "USERS").write_text("0 0 4294967295\n")
    assert places._unsuitable(parent) == f"{parent} belongs to user 65534"


def test_the_file_system_of_the_innermost_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "a b"
    mounts.write_text(
        f"x / ext4 rw 0 0\nx {tmp_path} tmpfs rw 0 0\nx {str(inner).replace(' ', chr(92) + '040')} lustre rw 0 0\n"
    )
    monkeypatch.setattr(places, "MOUNTS", mounts)
    assert [file_system(path) for path in (Path("/"), tmp_path, inner / "c")] == ["ext4", "tmpfs", "lustre"]
    monkeypatch.setattr(places, "MOUNTS", tmp_path / "none")
    assert file_system(tmp_path) == ""
