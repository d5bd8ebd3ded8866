"""The environment of ranks: queues and priorities by overlap, interfaces, and the warning of few cores."""

from __future__ import annotations

import sys

import pytest

from megapar.arguments import parse
from megapar.tools.launcher import environment as module
from megapar.tools.launcher.environment import environment, few_cores, interface_of, interfaces

MOE = "--num-experts 8 --moe-model-type deepspeed_moe --num-layers 2"


def of(flags: str = "", ranks: int = 4) -> dict[str, str]:
    config = parse("moe", [*MOE.split(), *flags.split()], {"WORLD_SIZE": str(ranks), "RANK": "0"})
    return environment(ranks, config, cuda=True, npu=False)


@pytest.mark.parametrize(
    ("flags", "queues"),
    [
        ("", "32"),
        ("--mp-degree 2 --tp-comm-overlap", "1"),
        ("--mp-degree 2 --hidden-size 4096 --seq-length 8192", "1"),  # as it is priced
        ("--mp-degree 2 --no-tp-comm-overlap", "32"),
        ("--mp-degree 2 --tp-comm-overlap --sharding-stage 3", "32"),
        ("--mp-degree 2 --tp-comm-overlap --ampipe-degree 2 --ep-degree 2", "32"),
        ("--mp-degree 2 --tp-comm-overlap --pp-degree 2 --gradient-merge-acc-step 2", "32"),
    ],
)
def test_kernels_start_in_program_order_where_only_products_hide_collectives(flags, queues):
    found = of(flags)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == queues
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert found["TORCH_NCCL_HIGH_PRIORITY"] == "1"


def test_one_rank_has_no_collective_to_prefer():
    assert "TORCH_NCCL_HIGH_PRIORITY" not in of(ranks=1)


def test_other_scripts_and_other_devices():
    plain = environment(2, None, cuda=False, npu=False, rocm=False)
    assert set(plain) == {"OMP_NUM_THREADS"}
    assert environment(2, None, cuda=True, npu=False)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment(2, None, cuda=False, npu=True)["TASK_QUEUE_ENABLE"] == "1"


def test_amds_devices_have_no_expandable_segments():
    config = parse("moe", MOE.split(), {"WORLD_SIZE": "4", "RANK": "0"})
    amd = environment(4, config, cuda=False, npu=False, rocm=True)
    assert set(amd) == {"OMP_NUM_THREADS", "TORCH_NCCL_HIGH_PRIORITY"}


linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")


@linux
def test_loopback_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""  # nobody's


@linux
def test_a_job_on_loopback_listens_there_alone() -> None:
    assert interfaces("127.0.0.1", {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth1"}) == {"NCCL_SOCKET_IFNAME": "lo"}


@linux
def test_gloo_is_told_where_the_machines_name_is_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interface_of", {"10.0.0.7": "ib0"}.__getitem__)
    monkeypatch.setattr(module.socket, "gethostbyname", lambda name: name if name[0].isdigit() else "127.0.1.1")
    assert interfaces("10.0.0.7", {}) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert interfaces("10.0.0.7", {"GLOO_SOCKET_IFNAME": "eth1"}) == {}
    monkeypatch.setattr(module.socket, "gethostbyname", lambda name: "10.0.0.7")
    assert interfaces("10.0.0.7", {}) == {}


@pytest.mark.parametrize(
    ("ranks", "usable", "present", "warns"),
    [
        (8, 1, 96, True),  # srun without --cpus-per-task
        (8, 7, 96, True),
        (8, 8, 96, False),
        (4, 2, 2, False),  # a laptop: no scheduler keeps cores from it
        (4, 1, 2, True),
        (1, 1, 96, False),
    ],
)
def test_ranks_that_share_cores_although_there_are_more(ranks: int, usable: int, present: int, warns: bool) -> None:
    assert bool(list(few_cores(ranks, usable, present, {}))) == warns


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        ({"SLURM_JOB_ID": "7"}, "SRUN_CPUS_PER_TASK=N"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "limits.cpu"),
        ({}, "taskset"),
    ],
)
def test_the_advice_is_for_the_scheduler(environ: dict[str, str], advice: str) -> None:
    (line,) = few_cores(8, 1, 96, environ)
    assert line.startswith("warning: 8 ranks share 1 of this machine's 96 cores")
    assert advice in line


@linux
def test_an_address_may_be_a_name() -> None:
    assert interfaces("localhost", {}) == interfaces("127.0.0.1", {})
    assert interfaces("localhost", {})
    assert "NCCL_SOCKET_IFNAME" not in interfaces("node0..x", {})


@linux
def test_a_name_that_is_a_loopback_address_here_is_none_for_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "NCCL_SOCKET_IFNAME" not in interfaces("node0", {})


def test_the_allocator_is_the_user_s_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in of("")
