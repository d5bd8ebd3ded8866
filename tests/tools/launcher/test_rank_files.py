"""Files of ranks: private folders on a local disk, and logs by job and start; nothing that is there is lost."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megapar.errors import DistributedError
from megapar.launch_environment import ROUND
from megapar.tools.launcher import rank_files
from megapar.tools.launcher.rank_files import PREFIX, RankFiles, RankLogs, file_system, log_file
from tests.support.ranks import forked

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
        "import os, sys; from megapar.tools.launcher.rank_files import RankFiles\n"
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
    monkeypatch.setattr(rank_files, "MOUNTS", mounts)
    unfit = [str(tmp_path / "nowhere"), str(open_), str(shared)]
    assert RankFiles([*unfit, str(fit)]).folder.parent == fit
    with pytest.raises(DistributedError, match=r"No such file.*lets other users rename.*is on nfs4, which is shared"):
        RankFiles(unfit)


def test_a_container_does_not_know_the_owner_of_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a user namespace has one user alone, root's /tmp belongs to number 65534, as all others' folders do."""
    for name, content in (("USERS", "1000 1000 1\n"), ("OVERFLOW", "65534\n")):
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(rank_files, name, tmp_path / name)
    parent = tmp_path / "tmp"
    parent.mkdir()
    parent.chmod(0o1777)
    found = parent.stat()
    outside = os.stat_result((*found[:4], 65534, *found[5:]))
    monkeypatch.setattr(Path, "stat", lambda self, **_: outside if self == parent else found)
    assert rank_files._unsuitable(parent) == f"{parent} belongs to user 65534"
    monkeypatch.setattr(rank_files, "PLACES", (str(parent),))
    assert rank_files._unsuitable(parent) == ""
    (tmp_path / "USERS").write_text("0 0 4294967295\n")
    assert rank_files._unsuitable(parent) == f"{parent} belongs to user 65534"


def test_the_file_system_of_the_innermost_mount_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "a b"
    mounts.write_text(
        f"x / ext4 rw 0 0\nx {tmp_path} tmpfs rw 0 0\nx {str(inner).replace(' ', chr(92) + '040')} lustre rw 0 0\n"
    )
    monkeypatch.setattr(rank_files, "MOUNTS", mounts)
    assert [file_system(path) for path in (Path("/"), tmp_path, inner / "c")] == ["ext4", "tmpfs", "lustre"]
    monkeypatch.setattr(rank_files, "MOUNTS", tmp_path / "none")
    assert file_system(tmp_path) == ""


def ranks(*numbers: int) -> dict[int, dict[str, str]]:
    return {
        local: {"RANK": str(number), "TORCHELASTIC_RUN_ID": "job/1", "TORCHELASTIC_RESTART_COUNT": "7"}
        for local, number in enumerate(numbers)
    }


def test_nodes_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUND, "3")
    found = [RankLogs(str(tmp_path)).reify(envs) for envs in (ranks(0, 1), ranks(2, 3))]
    folder = tmp_path / "job%2F1" / "attempt-3"
    assert [dest.stdouts for dest in found] == [
        {local: str(folder / f"rank-{2 * node + local}.log") for local in range(2)} for node in range(2)
    ]
    assert found[0].stdouts == found[0].stderrs == found[0].tee_stdouts
    assert found[0].tee_stderrs == {}


def test_a_name_that_came_before_keeps_its_output(tmp_path: Path) -> None:
    for number in range(3):
        log = log_file(str(tmp_path), ranks(5)[0])
        RankLogs(str(tmp_path)).reify(ranks(5))
        log.write_text(str(number))
    assert {path.name: path.read_text() for path in log.parent.iterdir()} == {
        "rank-5.log": "2",
        "rank-5.log.1": "0",
        "rank-5.log.2": "1",
    }


def test_without_a_folder_ranks_say_where_the_launcher_does_and_note_what_ended_them(tmp_path: Path) -> None:
    logs = RankLogs()
    envs = ranks(0, 1)
    first, second = logs.reify(envs), logs.reify(ranks(0, 1))
    assert first.stdouts == first.stderrs == {0: "", 1: ""}
    assert first.tee_stdouts == {}
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == first.error_files[1]
    assert Path(first.error_files[1]).parent.is_dir()
    assert not set(first.error_files.values()) & set(second.error_files.values())


def start_and_die(folder: str) -> None:
    tempfile.tempdir = folder
    logs = RankLogs()
    os.kill(os.getpid(), signal.SIGKILL)
    logs.reify({})


def test_what_a_killed_launcher_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launcher = forked().Process(target=start_and_die, args=(str(tmp_path),))
    launcher.start()
    launcher.join()
    (left,) = tmp_path.glob("megapar-*")
    living = [RankLogs(), RankLogs()]
    assert not left.exists()
    assert len(list(tmp_path.glob("megapar-*"))) == len(living)


def test_a_folder_that_is_gone_leaves_ranks_the_launchers_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    logs = RankLogs(str(folder))
    folder.touch()  # a disk that takes nothing
    found = logs.reify(ranks(4, 5))
    assert found.stdouts == found.stderrs == {0: "", 1: ""}
    assert found.tee_stdouts == {}
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "no log file for ranks 4, 5: " in told
    folder.unlink()
    assert logs.reify(ranks(4, 5)).tee_stdouts.keys() == {0, 1}


def test_a_file_that_cannot_be_opened_is_nobodys(tmp_path: Path) -> None:
    log = log_file(str(tmp_path), ranks(4)[0])
    log.parent.mkdir(parents=True)
    log.symlink_to(tmp_path / "gone" / "file")
    found = RankLogs(str(tmp_path)).reify(ranks(4, 5))
    assert list(found.tee_stdouts) == [1]


def test_a_mount_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text("/dev/a / ext4 rw 0 0\nsrv:/d /mnt/données\\0401 nfs4 rw 0 0\n", encoding="utf-8")
    monkeypatch.setattr(rank_files, "MOUNTS", tmp_path / "mounts")
    assert rank_files.file_system(Path("/mnt/données 1/x")) == "nfs4"
