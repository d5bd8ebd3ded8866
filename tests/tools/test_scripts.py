"""What the shell scripts for clusters start, seen by a stand-in for Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAUNCH = "-m megapar.tools.main launch"
SHOWN = ("ASCEND_HOME_PATH", "HCCL_IF_IP")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Scripts with a python that prints what it is given, and a toolkit whose file reads an unset variable."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("gpu_day", "__pycache__"))
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    shown = "; ".join(f'echo "{name}=${{{name}:-}}"' for name in SHOWN)
    python.write_text(f'#!/bin/sh\necho "$@"\n{shown}\n', encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit/set_env.sh").write_text(
        "export ASCEND_HOME_PATH=/toolkit${NO_SUCH_VARIABLE}\n", encoding="utf-8"
    )
    return tmp_path


def start(tree: Path, script: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return subprocess.run(
        ["bash", str(tree / "scripts" / script), *flags],
        env={**kept, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def stand_in(tree: Path, **commands: str) -> dict[str, str]:
    """Commands of Slurm that do this, and the variables of a job that finds them."""
    for name, line in {"scontrol": "echo node0", **commands}.items():
        (tree / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tree / name).chmod(0o755)
    place = {"PATH": f"{tree}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    return {**place, "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tree)}


def test_one_machine(tree: Path) -> None:
    done = start(tree, "local.sh", "--config", "X.yaml", RANKS="4", SCRIPT="pretrain_ernie.py")
    assert done.stdout.splitlines()[0] == f"{LAUNCH} --nproc-per-node 4 pretrain_ernie.py --config X.yaml"


def test_several_machines(tree: Path) -> None:
    place = {"HEAD": "node0:29500", "NODES": "2", "NODE": "1", "RANKS": "8"}
    done = start(tree, "multi_node.sh", "--lr", "1", **place, LAUNCH="--preflight")
    assert done.stdout.splitlines()[0] == (
        f"{LAUNCH} --nnodes 2 --node-rank 1 --nproc-per-node 8 --rdzv-endpoint node0:29500 "
        "--preflight pretrain_moe.py --lr 1"
    )
    assert "number of machines" in start(tree, "multi_node.sh", HEAD="node0:29500").stderr


def test_slurm_gives_every_start_a_secret_of_its_own(tree: Path) -> None:
    place = stand_in(tree, srun='echo "secret=$MEGAPAR_SECRET"')
    said = [start(tree, "slurm.sbatch", **place).stdout.splitlines()[-1] for _ in range(2)]
    assert all(len(secret) == len("secret=") + 44 for secret in said), said
    assert said[0] != said[1]
    assert start(tree, "slurm.sbatch", **place, MEGAPAR_SECRET="own").stdout.splitlines()[-1] == "secret=own"


def slurm(tree: Path, **environ: str) -> str:
    """The output of slurm.sbatch, with an srun that starts its command as task 1 and shows the CPUs of a task."""
    place = stand_in(tree, srun='shift; echo "cpus=$SRUN_CPUS_PER_TASK"; SLURM_PROCID=1 exec "$@"')
    done = start(tree, "slurm.sbatch", "--lr", "1", **place, SLURM_NTASKS_PER_NODE="1", **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_slurm_names_logs_by_the_job_and_numbers_nodes(tree: Path) -> None:
    place = {"SLURM_JOB_NAME": "big run", "SLURM_RESTART_COUNT": "2", "SLURM_GPUS_ON_NODE": "8"}
    lines = slurm(tree, **place, LAUNCH="--preflight", SCRIPT="pretrain_ernie.py").splitlines()
    assert lines[0] == "job 7, start 2: 2 x 8 ranks, 1 CPUs each, node0:20007, logs in logs/big_run-7-2"
    assert lines[2] == (
        f"{LAUNCH} --nnodes 2 --node-rank 1 --nproc-per-node 8 --rdzv-endpoint node0:20007 --rdzv-id big_run-7-2 "
        "--log-dir logs --preflight pretrain_ernie.py --lr 1"
    )
    assert "--log-dir" not in slurm(tree, LOG_DIR="", RANKS="8")


@pytest.mark.parametrize(
    ("environ", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "24"}, "24"),
        ({"SLURM_JOB_CPUS_PER_NODE": "96(x3),64"}, "64"),  # all that the job has, on each of its nodes
        ({"SLURM_JOB_CPUS_PER_NODE": "96", "SLURM_CPUS_PER_TASK": "24", "SRUN_CPUS_PER_TASK": "12"}, "12"),
        ({}, "1"),
    ],
)
def test_slurm_gives_the_launcher_the_cpus_of_the_job(tree: Path, environ: dict[str, str], cpus: str) -> None:
    assert f"cpus={cpus}\n" in slurm(tree, RANKS="8", **environ)


def test_slurm_starts_ascend_nodes(tree: Path) -> None:
    place = {"NODE_SCRIPT": "scripts/ascend_multi_node.sh", "ASCEND_TOOLKIT": str(tree / "toolkit"), "RANKS": "16"}
    assert "--nproc-per-node 16" in slurm(tree, **place)
    assert "--device npu --lr 1" in slurm(tree, **place)


def test_slurm_says_where_to_submit_from(tree: Path) -> None:
    done = start(tree, "slurm.sbatch", SLURM_SUBMIT_DIR=str(tree / "toolkit"))
    assert done.returncode == 2
    assert f"scripts/multi_node.sh does not exist in {tree}/toolkit" in done.stderr


def test_slurm_s_script_alone_says_how_to_start_it(tree: Path) -> None:
    done = start(tree, "slurm.sbatch", "--config", "X.yaml")
    assert done.returncode == 2
    assert re.search(r"Start it by: sbatch \S+/scripts/slurm.sbatch --config X.yaml\n", done.stderr)


def test_slurm_requeues_before_the_limit_where_a_save_takes_too_long(tree: Path) -> None:
    """The stand-in of srun asks the job to stop, and ends only when the job was requeued."""
    os.mkfifo(tree / "requeued")
    place = stand_in(
        tree,
        srun=f'kill -TERM $PPID; read -r line < "{tree}/requeued"',
        scontrol=f'[ "$1" = requeue ] || exec echo node0; mkdir "{tree}/once" && echo > "{tree}/requeued"; true',
        scancel="echo scancel $*",
        squeue="date -d 'now + 20 seconds' +%Y-%m-%dT%H:%M:%S",
    )
    done = start(tree, "slurm.sbatch", **{**place, "SLURM_JOB_NODELIST": "node0", "SLURM_JOB_NUM_NODES": "1"})
    assert done.returncode == 0, done.stderr
    assert "scancel --signal=TERM 7" in done.stdout
    assert "the save is not done" in done.stdout


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("pytorchjob", {"PET_MASTER_ADDR": "megapar-0", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": "3"}),
        ("job", {"JOB_COMPLETION_INDEX": "3"}),
    ],
)
def test_a_pod_of_kubernetes(tree: Path, name: str, place: dict[str, str]) -> None:
    """The command of a pod, with the variables that the manifest and the operator give it."""
    manifest = list(yaml.safe_load_all((SCRIPTS / f"kubernetes/{name}.yaml").read_text(encoding="utf-8")))[-1]["spec"]
    node = manifest["pytorchReplicaSpecs"]["Worker"] if name == "pytorchjob" else manifest
    nodes = int(node["replicas"]) + 1 if name == "pytorchjob" else int(node["completions"])
    container = node["template"]["spec"]["containers"][0]
    given = {one["name"]: one["value"].replace("$(POD_IP)", "10.0.0.7") for one in container["env"] if "value" in one}
    assert given["NODES"] == str(nodes)
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": os.environ["PATH"], **place, **given},
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    head = "megapar-0:29500" if name == "pytorchjob" else "megapar-0.megapar:29500"
    assert done.stdout.splitlines()[0].startswith(
        f"{LAUNCH} --nnodes 8 --node-rank 3 --nproc-per-node 8 --rdzv-endpoint {head} --rdzv-id mixtral "
        "--local-addr 10.0.0.7 --require-secret --log-dir /runs/logs --max-restarts 3 pretrain_moe.py --config "
    )


def test_ascend_on_one_machine(tree: Path) -> None:
    done = start(tree, "ascend.sh", "--lr", "1", RANKS="8", ASCEND_TOOLKIT=str(tree / "toolkit"))
    assert done.stdout.splitlines() == [
        f"{LAUNCH} --nproc-per-node 8 pretrain_moe.py --device npu --lr 1",
        "ASCEND_HOME_PATH=/toolkit",
        "HCCL_IF_IP=",
    ]


def test_ascend_on_several_machines(tree: Path) -> None:
    place = {"HEAD": "node0:29500", "NODES": "2", "NODE": "1", "RANKS": "8", "ASCEND_TOOLKIT": str(tree / "toolkit")}
    done = start(tree, "ascend_multi_node.sh", "--lr", "1", **place, ADDR="10.0.0.7", JOB="a")
    assert done.stdout.splitlines() == [
        f"{LAUNCH} --nnodes 2 --node-rank 1 --nproc-per-node 8 --rdzv-endpoint node0:29500 --rdzv-id a "
        "--local-addr 10.0.0.7 pretrain_moe.py --device npu --lr 1",
        "ASCEND_HOME_PATH=/toolkit",
        "HCCL_IF_IP=10.0.0.7",
    ]
    plain = start(tree, "ascend_multi_node.sh", **place).stdout
    assert "--local-addr" not in plain
    assert "HCCL_IF_IP=\n" in plain


@pytest.mark.parametrize("script", ["ascend.sh", "ascend_multi_node.sh"])
def test_ascend_without_a_toolkit_or_an_npu_is_told(tree: Path, script: str) -> None:
    done = start(tree, script, ASCEND_TOOLKIT=str(tree / "nowhere"))
    assert done.returncode == 2
    assert f"{script}: " in done.stderr
    assert "set ASCEND_TOOLKIT to the folder of the toolkit" in done.stderr
    none = start(tree, script, ASCEND_TOOLKIT=str(tree / "toolkit"), RANKS="0")
    assert none.returncode == 2
    assert "no NPU" in none.stderr


def test_the_example_of_several_machines_fills_them() -> None:
    """Two machines of 8 NPUs, as the script says."""
    said = (SCRIPTS / "ascend_multi_node.sh").read_text(encoding="utf-8")
    assert "NODES=2" in said
    config = SCRIPTS.parent / "configs/mindspeed-ampipe.yaml"
    assert "world_size: 16\n" in config.read_text(encoding="utf-8")
