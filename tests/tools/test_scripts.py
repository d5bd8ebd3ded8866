"""What the shell scripts for clusters start, seen by a stand-in for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
    commands = {"scontrol": "echo node0", "srun": 'echo "secret=$MEGAPAR_SECRET"'}
    for name, line in commands.items():
        (tree / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tree / name).chmod(0o755)
    place = {"PATH": f"{tree}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    place |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(tree)}
    said = [start(tree, "slurm.sbatch", **place).stdout.splitlines()[-1] for _ in range(2)]
    assert all(len(secret) == len("secret=") + 44 for secret in said), said
    assert said[0] != said[1]
    assert start(tree, "slurm.sbatch", **place, MEGAPAR_SECRET="own").stdout.splitlines()[-1] == "secret=own"


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
