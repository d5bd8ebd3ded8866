"""What the launcher sets for ranks: queues and priorities by what hides under what."""

from __future__ import annotations

import pytest

from megapar.arguments import parse
from megapar.tools.launcher.environment import environment

MOE = ("--num-experts", "8", "--moe-model-type", "deepspeed_moe", "--num-layers", "2")


def of(*flags: str, ranks: int = 4) -> dict[str, str]:
    config = parse("moe", [*MOE, *flags], {"WORLD_SIZE": str(ranks), "RANK": "0"})
    return environment(ranks, config, cuda=True, npu=False)


@pytest.mark.parametrize(
    ("flags", "queues"),
    [
        ((), "32"),
        (("--mp-degree", "2", "--tp-comm-overlap"), "1"),
        (("--mp-degree", "2", "--hidden-size", "4096", "--seq-length", "8192"), "1"),  # as it is priced
        (("--mp-degree", "2", "--no-tp-comm-overlap"), "32"),
        (("--mp-degree", "2", "--tp-comm-overlap", "--sharding-stage", "3"), "32"),
        (("--mp-degree", "2", "--tp-comm-overlap", "--ampipe-degree", "2", "--ep-degree", "2"), "32"),
        (("--mp-degree", "2", "--tp-comm-overlap", "--pp-degree", "2", "--gradient-merge-acc-step", "2"), "32"),
    ],
)
def test_kernels_start_in_program_order_where_only_products_hide_collectives(flags, queues):
    found = of(*flags)
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
    config = parse("moe", list(MOE), {"WORLD_SIZE": "4", "RANK": "0"})
    amd = environment(4, config, cuda=False, npu=False, rocm=True)
    assert set(amd) == {"OMP_NUM_THREADS", "TORCH_NCCL_HIGH_PRIORITY"}
