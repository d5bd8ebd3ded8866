"""Where a job's secret comes from, which are refused, and the name that its nodes sign."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore

from megapar.errors import ConfigError, DistributedError
from megapar.tools.launcher.secret import launch_name
from megapar.tools.launcher.secret_file import VARIABLE, take


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A secret that only its owner may read."""
    made = tmp_path / "secret"
    made.write_text("of the file, long enough\n")
    made.chmod(0o600)
    return made


def test_a_file_wins_over_the_variable_and_ranks_get_neither(file: Path) -> None:
    environ = {"MEGAPAR_SECRET": "of the variable, long enough", "HOME": "/"}
    assert take("", dict(environ)) == b"of the variable, long enough"
    assert take(str(file), environ) == b"of the file, long enough"
    assert environ == {"HOME": "/"}
    assert take("", environ) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o606, 0o644])
def test_a_file_that_others_may_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"open to other users \(mode 0{mode:o}\). Run chmod 600"):
        take(str(file), {})


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {own}, not to {own + 1}"):
        take(str(file), {})


def test_what_is_no_file_or_no_secret_is_refused(file: Path) -> None:
    os.mkfifo(file.with_name("pipe"), 0o600)
    file.write_text("x" * 15)
    problems = {"nowhere": "cannot be read", "secret": "contains 15 bytes"}
    for name, text in {**problems, **dict.fromkeys(("pipe", "."), "not a regular file")}.items():
        with pytest.raises(ConfigError, match=text):
            take(str(file.parent / name), {})
    with pytest.raises(ConfigError, match="MEGAPAR_SECRET contains 0 bytes"):
        take("", {"MEGAPAR_SECRET": ""})


def test_a_required_secret_must_be_there() -> None:
    assert take("", {"MEGAPAR_SECRET": "x" * 16}, required=True) == b"x" * 16
    with pytest.raises(ConfigError, match="but there is no secret"):
        take("", {}, required=True)


class Lost(HashStore):
    """A store whose other end is gone."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise DistNetworkError("Connection reset by peer")


def test_nodes_that_meet_have_one_name_and_other_launches_have_others() -> None:
    store, another = HashStore(), HashStore()
    assert launch_name(2, "", store) == launch_name(2, "", store)
    assert len({launch_name(2, "", store), launch_name(2, "", another), launch_name(2, "job", store)}) == 3


def test_one_node_has_another_name_each_time() -> None:
    store = HashStore()
    assert launch_name(1, "", store) != launch_name(1, "", store)


@pytest.mark.parametrize("written", ["unsigned ../../home", "unsigned", "\xff", "unsigned " + "A" * 32])
def test_a_name_that_no_launcher_has_written_is_refused(written: str) -> None:
    """It becomes the name of a folder, which is removed at the end."""
    store = HashStore()
    store.set("megapar/launch/job", written)
    with pytest.raises(DistributedError, match="launch of job job"):
        launch_name(2, "job", store)


def test_a_store_that_does_not_answer_is_told() -> None:
    with pytest.raises(DistributedError, match="the launch of job x does not answer: Connection reset by peer"):
        launch_name(2, "x", Lost())


def test_a_name_is_signed_where_there_is_a_secret() -> None:
    store = HashStore()
    name = launch_name(2, "job", store, b"x" * 16)
    assert launch_name(2, "job", store, b"x" * 16) == name
    for other in (b"y" * 16, None):
        with pytest.raises(DistributedError):
            launch_name(2, "job", store, other)


def test_a_secret_may_be_any_bytes() -> None:
    assert take("", {VARIABLE: os.fsdecode(b"\xff" * 32)}) == b"\xff" * 32
