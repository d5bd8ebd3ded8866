"""What communicators keep on a device, and what groups ask of their library."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megapar.core.device.base import Device
from megapar.core.device.communicators import COMMUNICATORS, MEBIBYTE, QUEUE_CHANNELS, SMALL_HCCL_MIB
from megapar.core.device.cuda import CudaDevice
from megapar.core.device.npu import NpuDevice

HOUR = timedelta(hours=1)


class NcclOptions:
    """ProcessGroupNCCL.Options, which a torch for CPUs has not."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=32)
        self._timeout = timedelta()
        self.is_high_priority_stream = False


class HcclOptions:
    """ProcessGroupHCCL.Options."""

    hccl_config: dict[str, int]


def unmade(kind: type[Device]) -> Device:
    """A device that is not here."""
    return object.__new__(kind)


@pytest.mark.parametrize(("queue", "blocks"), [(True, QUEUE_CHANNELS), (False, 32)])
def test_collectives_on_a_gpu_go_first_and_a_queue_s_kernels_get_few_blocks(queue: bool, blocks: int) -> None:
    with patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), create=True):
        first, second = (unmade(CudaDevice).group_options(("pp",), HOUR, queue=queue) for _ in range(2))
    assert first is not second  # torch writes the ranks of a group into its options
    for options in (first, second):
        assert (options.config.max_ctas, options._timeout) == (blocks, HOUR)
        assert options.is_high_priority_stream is True  # whoever started the ranks


@pytest.mark.parametrize(
    ("names", "queue", "small"),
    [(("pp",), True, True), (("data",), False, True), (("sharding", "data"), False, False), (("ep",), False, False)],
)
def test_groups_of_an_npu_that_carry_little_get_small_buffers(names: tuple[str, ...], queue: bool, small: bool) -> None:
    def npu(options: Any) -> Any:
        here = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=options))
        return patch.dict(sys.modules, torch_npu=SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=here)))

    HcclOptions.hccl_config = {}
    with npu(HcclOptions):
        options = unmade(NpuDevice).group_options(names, HOUR, queue=queue)
    assert (options is not None) == small
    if small:
        assert options.hccl_config == {"hccl_buffer_size": SMALL_HCCL_MIB}
    with npu(object):  # of a torch_npu that gives groups no choice
        assert unmade(NpuDevice).group_options(names, HOUR, queue=queue) is None


def test_bytes_are_those_of_axes_and_queues() -> None:
    rounds = [("world",), ("pp",), ("sharding", "data", "shard"), ("ep",)]
    assert COMMUNICATORS["cpu"].of(rounds, 4, 7) == 0
    assert COMMUNICATORS["cuda"].of(rounds, 4, 7) == (4 * 24 + 4 * QUEUE_CHANNELS + 7 * 32) * 12 * MEBIBYTE
    assert COMMUNICATORS["npu"].of(rounds, 4, 7) == (3 * 400 + 40 + 4 * 40) * MEBIBYTE
    assert Device().group_options(("pp",), HOUR, queue=True) is None
