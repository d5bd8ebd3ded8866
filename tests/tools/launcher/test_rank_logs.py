"""Folders by the job and its starts, files by global rank; nothing that is there is lost."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from megapar.launch_environment import ROUND
from megapar.tools.launcher.rank_logs import RankLogs, log_file
from tests.support.ranks import forked


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
