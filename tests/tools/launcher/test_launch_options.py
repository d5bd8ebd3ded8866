"""What the launcher is asked for: read, or refused with all complaints at once before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.tools.launcher.launch_options import read


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "job.py").touch()
    return str(tmp_path / "job.py")


def test_what_is_asked_for_is_read(script: str) -> None:
    options = ["--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-conf", "join_timeout=60,is_host=true"]
    launch, given = read([*options, "--preflight", script, "--lr", "1e-4"])
    assert (launch.nproc_per_node, launch.max_restarts, launch.world_size) == (2, 3, 2)
    assert launch.rdzv_conf == {"join_timeout": "60", "is_host": "true"}
    assert launch.command == (script, "--lr", "1e-4")
    assert given.preflight


@pytest.mark.parametrize(
    ("options", "complaints"),
    [
        (["--rdzv-backend", "foo"], ["--rdzv-backend foo is not one of c10d, etcd, etcd-v2, static"]),
        (["--rdzv-conf", "join_timeout=abc"], ["join_timeout=abc: 'abc' is not a whole number >= 1"]),
        (["--rdzv-conf", "join_timeout=0"], ["--rdzv-conf join_timeout=0: '0' is not a whole number >= 1"]),
        (["--rdzv-conf", "keep_alive_max_attempt=0"], ["'0' is not a whole number >= 1"]),
        (["--rdzv-backend", "etcd-v2", "--rdzv-conf", "last_call_timeout=0"], ["'0' is not a whole number >= 1"]),
        (["--rdzv-backend", "etcd", "--rdzv-conf", "last_call_timeout=x"], ["'x' is not a whole number >= 0"]),
        (["--rdzv-conf", "timeout"], ["--rdzv-conf timeout is not NAME=VALUE"]),
        (["--rdzv-conf", "is_host=perhaps"], ["'perhaps' is neither true nor false"]),
        (["--rdzv-conf", "store_type=disk"], ["'disk' is neither file nor tcp"]),
        (["--max-restarts", "-1"], ["argument --max-restarts: '-1' is not a whole number >= 0"]),
        (["--max-restarts", "1", "--rdzv-backend", "static"], ["a static rendezvous happens only once"]),
        (["--rdzv-backend", "static"], ["needs --node-rank", "needs --rdzv-endpoint HOST:PORT"]),
        (["--nnodes", "2", "--rdzv-backend", "static", "--rdzv-endpoint", "host:1"], ["static needs --node-rank"]),
        (
            ["--nnodes", "2", "--rdzv-backend", "static", "--rdzv-endpoint", "host", "--node-rank", "2"],
            ["--node-rank 2 is outside 0 to 1, the numbers of 2 static nodes", "needs --rdzv-endpoint HOST:PORT"],
        ),
        (
            ["--nnodes", "2", "--max-restarts", "1", "--rdzv-backend", "etcd-v2", "--rdzv-conf", "timeout=x"],
            ["--rdzv-endpoint HOST:PORT", "--rdzv-id that is unique to this job", "'x' is not a whole number"],
        ),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], complaints: list[str], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read([*options, script])
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    for complaint in complaints:
        assert complaint in told


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--rdzv-backend etcd-v2 --rdzv-conf protocol=https", {"protocol": "https"}),  # nothing is known of it here
        ("--rdzv-backend etcd --rdzv-conf last_call_timeout=0", {"last_call_timeout": "0"}),
        ("--rdzv-backend static --rdzv-endpoint host:1 --node-rank 0", {"rank": 0}),
    ],
)
def test_what_looks_like_that_and_can_be_is_taken(options: str, found: dict[str, object], script: str) -> None:
    assert read([*options.split(), script])[0].rdzv_conf.items() >= found.items()
