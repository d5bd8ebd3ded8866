"""What the launcher is asked for: read, or refused with all complaints at once before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.tools.launcher.launch_options import read, split_endpoint


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "job.py").touch()
    return str(tmp_path / "job.py")


def test_what_is_asked_for_is_read(script: str) -> None:
    options = ["--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-conf", "join_timeout=60,is_host=true"]
    options = [option.replace("--nproc-per-node", "--nproc_per_node") for option in options]  # as torchrun takes it
    launch, given = read([*options, "--preflight", script, "--lr", "1e-4"])
    assert (launch.nproc_per_node, launch.max_restarts, launch.world_size) == (2, 3, 2)
    assert launch.rdzv_conf == {"join_timeout": "60", "is_host": "true"}
    assert launch.command == (script, "--lr", "1e-4")
    assert given.preflight


@pytest.mark.parametrize(
    ("options", "complaints"),
    [
        (["--rdzv-backend", "etcd"], ["argument --rdzv-backend: invalid choice: 'etcd'"]),
        (["--rdzv-conf", "join_timeout=abc"], ["join_timeout=abc: 'abc' is not a whole number >= 1"]),
        (["--rdzv-conf", "join_timeout=0"], ["--rdzv-conf join_timeout=0: '0' is not a whole number >= 1"]),
        (["--rdzv-conf", "keep_alive_max_attempt=0"], ["'0' is not a whole number >= 1"]),
        (["--rdzv-conf", "timeout"], ["--rdzv-conf timeout is not NAME=VALUE"]),
        (["--rdzv-conf", "is_host=perhaps"], ["'perhaps' is neither true nor false"]),
        (["--rdzv-conf", "store_type=disk"], ["'disk' is neither file nor tcp"]),
        (["--master_addr", "host"], ["--master_addr", "Did you mean --rdzv-endpoint HOST:PORT?"]),
        (["--config", "a.yaml"], ["Did you mean pretrain moe --config?"]),
        (["--validate-only"], ["unrecognized arguments: --validate-only", "--validate-only after the script?"]),
        (["--rdzv-endpoint", "node0:99500"], ["must be HOST:PORT, with a port up to 65535, got node0:99500"]),
        (["--rdzv-endpoint", "node0:http"], ["--rdzv-endpoint must be HOST:PORT", "got node0:http"]),
        (["--nnodes", "2", "--require-secret"], ["there is no secret", "several nodes need --rdzv-endpoint"]),
        (
            ["--rdzv-endpoint", ":1", "--secret-file", "nowhere"],
            ["--rdzv-endpoint must be HOST:PORT", "--secret-file nowhere cannot be read"],
        ),
        (["--max-restarts", "-1"], ["argument --max-restarts: '-1' is not a whole number >= 0"]),
        (
            ["--nnodes", "2", "--max-restarts", "1", "--rdzv-conf", "timeout=x"],
            ["several nodes need --rdzv-endpoint HOST:PORT", "'x' is not a whole number"],
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


def test_settings_of_torch_are_taken_as_they_are(script: str) -> None:
    options = ("--rdzv-backend", "c10d", "--rdzv-conf", "protocol=https")
    assert read([*options, script])[0].rdzv_conf == {"protocol": "https"}  # nothing is known of it here


def test_an_endpoint_without_a_port_has_torch_s_default(script: str) -> None:
    assert split_endpoint("node0") == ("node0", 29400)
    assert split_endpoint("[::1]:5") == ("::1", 5)
    shared = ["--rdzv-endpoint", "/shared/file:x", "--rdzv-conf", "store_type=file"]
    assert read([*shared, script])[0].rdzv_endpoint == "/shared/file:x"


def test_flags_of_the_script_stay_as_they_are(script: str) -> None:
    words = ["--log_dir", "out", "--node_rank=3", "--warm_start"]
    launch, _ = read(["--nproc_per_node", "2", script, *words])
    assert list(launch.command[-4:]) == words
    assert launch.nproc_per_node == 2


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ("timeout=5, join_timeout=0", "'0' is not a whole number"),
        ("local_addr=b", "an option of the launcher itself"),
    ],
)
def test_pairs_are_read_as_torchrun_reads_them(
    conf: str, told: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(["--nproc-per-node", "2", "--rdzv-conf", conf, script])
    assert told in capsys.readouterr().err
    launch, _ = read(["--nproc-per-node", "2", "--rdzv-conf", "timeout = 5, store_type=file,", script])
    assert launch.rdzv_conf == {"timeout": "5", "store_type": "file"}


def test_numbers_of_nodes_begin_with_0(script: str) -> None:
    assert read(["--nproc-per-node", "2", "--node-rank", "0", script])[1].node_rank == 0
    with pytest.raises(SystemExit, match="2"):
        read(["--nproc-per-node", "2", "--node-rank", "-1", script])
