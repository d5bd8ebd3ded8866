"""``megapar launch`` with real processes and a script of four lines: statuses, signals, environment, one report.

The launcher is forked with torch imported, but where its own start is looked at; its ranks never are.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from megapar.arguments import parse_or_exit
from megapar.tools.launcher.launch import main, run
from megapar.tools.launcher.launch_options import read
from megapar.tools.launcher.meeting import MeetingPlace, make_handler, meet_by_file
from megapar.tools.launcher.preflight import describe
from megapar.tools.launcher.stopper import Stopper
from tests.support.process import Command, clean_environ

ROOT = Path(__file__).parents[3]
LAUNCH = [sys.executable, "-m", "megapar.tools.main", "launch"]
PATIENCE_SECONDS = 120


# Ranks run unbuffered, so that a print is several writes; of whole lines, none is divided by another rank's.
HEAD = """import os, signal, sys, time
sys.stdout.reconfigure(write_through=False, line_buffering=True)
rank = int(os.environ['RANK'])
"""


def script(folder: Path, body: str) -> str:
    path = folder / "job.py"
    path.write_text(f"{HEAD}{body}\n", encoding="utf-8")
    return str(path)


def launch(tmp_path: Path, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return Command(["launch", *argv], tmp_path, clean_environ(**extra), ROOT).wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(("body", "status"), [("sys.exit(2)", 2), ("sys.exit(3 if rank else 0)", 1)])
def test_status_of_the_job(tmp_path: Path, body: str, status: int) -> None:
    assert launch(tmp_path, "--nproc-per-node", "2", script(tmp_path, body)).returncode == status


@pytest.mark.parametrize("start", ["--no-warm-start", "--warm-start"])
def test_a_failure_is_seen_where_the_launcher_was_started_to_ignore_the_ends_of_children(
    tmp_path: Path, start: str
) -> None:
    """Job wrappers do so, and it outlives exec: the kernel keeps no status then, which is taken for 0."""
    line = ["launch", start, "--max-restarts", "1", script(tmp_path, "print('job', flush=True); sys.exit(3)")]
    done = Command(line, tmp_path, clean_environ(), ROOT, [signal.SIGCHLD]).wait(PATIENCE_SECONDS)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["job", "job"]
    assert "started one by one" not in done.stderr


def test_refusal_of_one_rank_while_others_work_is_a_refusal(tmp_path: Path) -> None:
    body = "sys.exit(2) if rank == 0 else time.sleep(60)"
    started = time.monotonic()
    assert launch(tmp_path, "--nproc-per-node", "2", script(tmp_path, body)).returncode == 2
    assert time.monotonic() - started < 60


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    body = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    done = launch(tmp_path, "--nproc-per-node", "2", script(tmp_path, body))
    assert done.returncode == 1
    assert "megapar launch: rank 1 was killed (signal 9)\n" in done.stderr


def test_what_all_ranks_find_later_is_said_by_one_of_them(tmp_path: Path) -> None:
    """A record behind the first one is read by the ranks: a start cannot know it."""
    data = tmp_path / "second.jsonl"
    data.write_text('{"text": "a"}\n{"body": "b"}\n', encoding="utf-8")
    line = ("--nproc-per-node", "2", "pretrain_moe.py", "--data-path", str(data))
    done = launch(tmp_path, *line, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("second.jsonl, line 2: no field 'text'") == 1
    assert "exitcode" not in done.stderr


def test_warnings_are_left_to_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--fuse-broadcast-MB", "32"]
    parse_or_exit("moe", line, {"WORLD_SIZE": "2"}, warn=False)
    assert capsys.readouterr().err == ""
    for rank in ("0", "1"):
        parse_or_exit("moe", line, {"WORLD_SIZE": "2", "RANK": rank})
    assert capsys.readouterr().err.count("old name") == 1


OF_TWO = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "host:1"]
NO_DISK = "/no/such/disk"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], ["script"]),
        (["--nproc-per-node", "0", "job.py"], ["--nproc-per-node"]),
        (["--stop-timeout", "nan", "job.py"], ["--stop-timeout"]),
        (["no-such-script.py"], ["no-such-script.py"]),
        (["--nnodes", "2", "pretrain_moe.py"], ["--rdzv-endpoint"]),
        (
            ["--nproc-per-node", "4", "pretrain_moe.py", "--no-such-flag", "--sharding-degree", "3"],
            ["unknown-flag", "[world-size]", "--world-size 4"],
        ),
        # The disk may be missing on one node, whose log is the only place that can name it.
        (
            [*OF_TWO, "pretrain_moe.py", "--data-path", NO_DISK],
            [f"{NO_DISK} does not exist", f"megapar launch: refused on node 1, {socket.gethostname()}"],
        ),
    ],
)
def test_a_line_that_cannot_be_is_refused_once_before_any_rank(
    argv: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    errors = capsys.readouterr().err
    assert [word for word in said if word not in errors] == []
    assert max(errors.count("unknown-flag"), errors.count("[world-size]")) <= 1


def test_validate_only_knows_the_ranks_of_all_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="0"):
        main(["--nproc-per-node", "4", *OF_TWO, "pretrain_moe.py", "--validate-only"])
    assert "accepted for 8 ranks" in capsys.readouterr().out


def test_ranks_get_flags_environment_threads_and_a_log_and_not_the_secret(tmp_path: Path) -> None:
    variables = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MEGAPAR_SECRET")
    job = script(tmp_path, f"print(*map(os.environ.get, {variables}), sys.argv[1:])")
    logs, extra = tmp_path / "logs", {"OMP_NUM_THREADS": "7", "MEGAPAR_SECRET": "x" * 32}
    done = launch(tmp_path, "--nproc-per-node", "2", "--log-dir", str(logs), job, "--lr", "1", **extra)
    assert done.returncode == 0
    got = [f"{rank} 2 7 None ['--lr', '1']\n" for rank in range(2)]
    assert f"[rank1]:{got[1]}" in done.stdout
    written = {path.name: path.read_text() for path in logs.glob("*/attempt-0/*")}
    assert written == {"rank-0.log": got[0], "rank-1.log": got[1]}


def test_logs_that_cannot_be_written_end_no_job(tmp_path: Path) -> None:
    """Their disk is lost under the ranks, one of which dies."""
    body = (
        "import shutil\n"
        "print('again' if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 'first', flush=True)\n"
        "if os.path.isdir(sys.argv[1]): shutil.rmtree(sys.argv[1]); open(sys.argv[1], 'w').close(); sys.exit(1)"
    )
    logs = str(tmp_path / "logs")
    done = launch(tmp_path, "--max-restarts", "1", "--log-dir", logs, script(tmp_path, body), logs)
    assert done.returncode == 0, done.stderr
    assert "again" in done.stdout.splitlines()
    assert done.stderr.count("megapar launch: no log file for ranks 0: ") == 1
    assert "Traceback" not in done.stderr


def test_logs_that_can_have_no_folder_are_refused(tmp_path: Path) -> None:
    job = script(tmp_path, "print('job')")
    done = launch(tmp_path, "--log-dir", f"{job}/logs", job)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"megapar launch: [log-dir] --log-dir {job}/logs is not a folder and cannot be created: Not a directory.\n"
    )


def test_preflight_measures_before_the_job(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc-per-node", "2", "--preflight", script(tmp_path, "print('job')"))
    assert done.returncode == 0
    said = done.stdout.splitlines()
    assert said[0].startswith("preflight: node 0: slowest rank: gemm TFLOP/s ")
    assert "all ranks GB/s" in said[0]
    assert said.index("job") > 1


@pytest.mark.parametrize(
    ("start", "nodes"),
    [
        ("--warm-start", "1"),
        pytest.param("--preflight", "1", marks=pytest.mark.table),
        ("--no-warm-start", "1:2"),
        pytest.param("--warm-start", "1:2", marks=pytest.mark.table),
    ],
)
def test_nothing_is_run_from_the_working_directory(tmp_path: Path, start: str, nodes: str) -> None:
    """A folder like /tmp has modules of any user, named as those that every program imports."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("yaml", "json", "torch"):
        (shared / f"{name}.py").write_text("import os; open('ran', 'w').close(); os._exit(7)")
    place = ["--nnodes", nodes, "--rdzv-endpoint", str(tmp_path / "nodes"), "--local-addr", "127.0.0.1"]
    place += ["--rdzv-conf", "store_type=file,last_call_timeout=1"]
    line = ["launch", start, *place, script(tmp_path, "import json\nprint('job', sys.path[0])")]
    done = Command(line, tmp_path, clean_environ(), shared).wait(PATIENCE_SECONDS)
    assert not (shared / "ran").exists()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"job {tmp_path}"
    assert nodes == "1" or b"megapar.rendezvous." in (tmp_path / "nodes").read_bytes()


def test_a_tree_that_is_only_the_working_directory_is_found(tmp_path: Path) -> None:
    """``python -m megapar.tools.main`` in it, with nothing installed and no PYTHONPATH."""
    line = [*LAUNCH, "--warm-start", script(tmp_path, "import megapar; print(megapar.__file__); sys.exit(2)")]
    variables = {**clean_environ(), "PYTHONPATH": ""}
    done = subprocess.run(line, capture_output=True, text=True, env=variables, cwd=ROOT, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, str(ROOT / "megapar" / "__init__.py"))
    assert "one by one" not in done.stderr


def test_a_preflight_waits_for_no_more_nodes_than_the_job(tmp_path: Path) -> None:
    conf = "store_type=file,last_call_timeout=1,join_timeout=20"
    options = ("--nnodes", "1:2", "--rdzv-endpoint", str(tmp_path / "nodes"), "--rdzv-conf", conf, "--preflight")
    options += ("--nproc-per-node", "1", "--local-addr", "127.0.0.1")
    done = launch(tmp_path, *options, script(tmp_path, "print('job')"))
    assert done.returncode == 0, done.stderr
    assert "preflight: node 0" in done.stdout


def test_a_node_that_comes_after_the_preflight_joins_the_job(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    over, _ = read(["--nnodes", "2", "--rdzv-endpoint", str(nodes), "--rdzv-id", "job-preflight", __file__])
    make_handler(over, meet_by_file(str(nodes), "127.0.0.1")).shutdown()
    options = ["--nnodes", "1:2", "--rdzv-id", "job", "--rdzv-endpoint", str(nodes), "--local-addr", "127.0.0.1"]
    options += ["--rdzv-conf", "store_type=file,last_call_timeout=1", "--preflight"]
    done = launch(tmp_path, *options, script(tmp_path, "print('job')"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "job\n"
    assert done.stderr.count("the preflight of this job is already over; joining the job without one") == 1


def test_rank_0_is_on_the_node_with_number_0(tmp_path: Path) -> None:
    """Two nodes of one address, whose own order is that of their process numbers."""
    place = ["--nnodes", "2", "--rdzv-endpoint", str(tmp_path / "nodes"), "--local-addr", "127.0.0.1"]
    place += ["--rdzv-conf", "store_type=file", "--rdzv-id", "job", "--no-warm-start"]
    place += ["--log-dir", str(tmp_path / "logs")]
    job, nodes = script(tmp_path, "print('rank', rank, 'of node', sys.argv[1])"), {}
    for number in ("1", "0"):
        (tmp_path / number).mkdir()
        line = ["launch", "--node-rank", number, *place, job, number]
        nodes[number] = Command(line, tmp_path / number, clean_environ(MEGAPAR_SECRET="of sixteen bytes or more"), ROOT)
    for number, node in nodes.items():
        done = node.wait(PATIENCE_SECONDS)
        assert done.returncode == 0, done.stderr
        assert f"rank {number} of node {number}" in done.stdout
    assert sorted(path.name for path in (tmp_path / "logs/job/attempt-0").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_slow_ranks_are_named() -> None:
    rates = [{"gemm TFLOP/s": 100.0}, {"gemm TFLOP/s": 99.0}, {"gemm TFLOP/s": 60.0}, {"gemm TFLOP/s": 101.0}]
    said = describe(rates, 2)
    assert "preflight: node 1: slowest rank: gemm TFLOP/s 60" in said
    assert "SLOW: rank 2 (node 1): gemm TFLOP/s 60, median 99.5" in said
    assert "no outlier" in describe(rates[:2], 2)


def test_after_a_death_all_ranks_start_again(tmp_path: Path) -> None:
    body = (
        "import pathlib\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(f'{sys.argv[1]}/{attempt}-{rank}', 'w').close()\n"
        "while not os.path.exists(f'{sys.argv[1]}/{attempt}-0'): time.sleep(0.05)\n"
        "if attempt == '0' and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if attempt == '0': time.sleep(100)"
    )
    done = launch(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", script(tmp_path, body), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("?-?")} == {"0-0", "0-1", "1-0", "1-1"}
    assert "megapar launch: rank 1 was killed (signal 9); restarting, 1 of 1\n" in done.stderr


def test_a_failure_comes_again_though_another_rank_is_the_first_to_end(tmp_path: Path) -> None:
    """Rank 1 fails and takes its time to leave; rank 0, which it left alone, is gone before it."""
    body = (
        "import json\n"
        "mark = f\"{sys.argv[1]}/attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}\"\n"
        "told = dict(type='DataError', where='a.py:1', step=3, saved=False, samples='', own=True, at=1.0)\n"
        "if rank == 1:\n"
        "    open(os.environ['TORCHELASTIC_ERROR_FILE'] + '.megapar', 'w').write(json.dumps(told))\n"
        "    open(mark, 'w').close(); time.sleep(100)\n"
        "while not os.path.exists(mark): time.sleep(0.02)\n"
        "sys.exit(1)"
    )
    done = launch(tmp_path, "--nproc-per-node", "2", "--max-restarts", "4", script(tmp_path, body), str(tmp_path))
    assert done.returncode == 1
    assert "DataError at step 3 again, at a.py:1, with no checkpoint in between" in done.stderr
    assert len(list(tmp_path.glob("attempt-*"))) == 2


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
LISTENERS = """
import glob, torch.distributed as dist
from datetime import timedelta
from megapar.core.comm.run_store import meet
store = meet(None, rank, 2, timedelta(seconds=60))
dist.init_process_group('gloo', store=store, rank=rank, world_size=2)
dist.barrier()
rows = [l.split() for f in ('tcp', 'tcp6') for l in open(f'/proc/net/{f}').readlines()[1:]]
def listens(pid):
    mine = {os.readlink(p) for p in glob.glob(f'/proc/{pid}/fd/*') if os.path.islink(p)}
    return sorted({r[1].rpartition(':')[0] for r in rows if r[3] == '0A' and f'socket:[{r[9]}]' in mine})
print('launcher listens', listens(os.getppid()))
print('rank listens', listens(os.getpid()))
dist.barrier()
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
@pytest.mark.parametrize("options", [(), ("--rdzv-endpoint", "localhost:0")], ids=["by file", "by port"])
def test_one_node_listens_nowhere_but_gloo_on_loopback(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every listening socket of the launcher and of its ranks, by the inodes that they hold."""
    done = launch(tmp_path, "--nproc-per-node", "2", *options, script(tmp_path, LISTENERS), TMPDIR=str(tmp_path))
    heard: dict[str, set[str]] = {"launcher": set(), "rank": set()}
    for line in done.stdout.splitlines():
        who, _, addresses = line.partition(" listens ")
        if who in heard:
            heard[who] |= set(eval(addresses))  # noqa: S307 (our own child's line)
    assert done.returncode == 0, done.stderr
    assert heard["rank"], done.stdout  # or the listing sees nothing
    assert heard["rank"] <= LOOPBACK
    assert heard["launcher"] <= (LOOPBACK if options else set())
    assert bool(heard["launcher"]) == bool(options)
    assert not list(tmp_path.glob("megapar-launch-*"))


def test_a_script_that_wants_torchruns_store_is_told_how_to_get_it(tmp_path: Path) -> None:
    done = launch(tmp_path, script(tmp_path, "import torch.distributed as dist\ndist.init_process_group('gloo')"))
    assert "none: pass --rdzv-endpoint localhost:0 to megapar launch to get one" in done.stderr


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--require-secret", "--require-secret is set, but there is no secret"),
        ("--secret-file=no-such-file", "--secret-file no-such-file cannot be read"),
    ],
)
def test_secrets_that_are_none_are_refused(tmp_path: Path, option: str, told: str) -> None:
    done = launch(tmp_path, "--nnodes", "2", "--rdzv-endpoint", "localhost:0", option, script(tmp_path, "pass"))
    assert done.returncode == 2
    assert told in done.stderr


def test_a_node_that_stood_by_until_the_end_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's agent gives no result where the rendezvous is closed to a node beyond those that it takes."""

    def closed(*_: object) -> None:
        raise RendezvousGracefulExitError("closed")

    monkeypatch.setattr(LocalElasticAgent, "_invoke_run", closed)
    (tmp_path / "job.py").touch()
    endpoint = ("--rdzv-endpoint", "127.0.0.1:1")
    launch, _ = read(["--nnodes", "2", *endpoint, "--rdzv-id", "job", str(tmp_path / "job.py")])
    store = HashStore()
    assert run(launch, MeetingPlace(store, "", "127.0.0.1", hosted=True), Stopper(1.0)) == 0
    assert "the other nodes, which did not need this one" in capsys.readouterr().err
