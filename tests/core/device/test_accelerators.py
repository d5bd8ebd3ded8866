"""What accelerators answer, what groups ask of their library, and pinned memory, without the devices."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.core.device.accelerators import Accelerator, CudaDevice, NpuDevice, pinned_exactly
from megapar.core.device.attention.whole import capability_of
from megapar.core.device.base import Device
from megapar.core.device.kinds import SMALL_HCCL_MIB, device_class

HOUR = timedelta(hours=1)
needs_maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells mappings by Linux's own list")
WANTED = {
    Device: {},
    CudaDevice: {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"},
    NpuDevice: {"HCCL_DETERMINISTIC": "true"},
}


@pytest.mark.parametrize("kind", WANTED, ids=lambda kind: kind.type)
def test_results_repeat_where_asked_for(kind, monkeypatch):
    """Kernels by torch's switch, libraries by their environment; a user's own setting stays."""
    for name in WANTED[kind]:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    device = object.__new__(kind)  # no such device is needed to say what its libraries read
    try:
        device.repeat_results()
        assert torch.are_deterministic_algorithms_enabled()
        assert {name: os.environ[name] for name in WANTED[kind]} == WANTED[kind]
        for name in WANTED[kind]:
            monkeypatch.setenv(name, "mine")
        device.repeat_results()
        assert all(os.environ[name] == "mine" for name in WANTED[kind])
    finally:
        torch.use_deterministic_algorithms(False)
    assert issubclass(kind, Accelerator) == bool(WANTED[kind])


@pytest.mark.parametrize(
    ("kind", "name", "capability", "dtype"),
    [
        (CudaDevice, "Tesla V100-SXM2-32GB", (7, 0), torch.float16),
        (CudaDevice, "Tesla T4", (7, 5), torch.float16),  # a name that the device table has not
        (CudaDevice, "NVIDIA GeForce RTX 4090", (8, 9), torch.bfloat16),
        (CudaDevice, "NVIDIA A100-SXM4-80GB", (8, 0), torch.bfloat16),
        (NpuDevice, "Ascend910A", None, torch.float16),
        (NpuDevice, "Ascend910B2", None, torch.bfloat16),
        (NpuDevice, "Ascend of another kind", None, torch.bfloat16),
    ],
)
def test_the_dtype_of_auto_is_one_that_the_device_has(kind, name, capability, dtype, monkeypatch):
    monkeypatch.setattr(kind, "name", name)
    monkeypatch.setattr(CudaDevice, "capability", capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert object.__new__(kind).default_dtype == dtype
    assert Device().default_dtype == torch.float32


def _amd(monkeypatch, name="AMD Instinct MI300X"):
    """A GPU of torch's build for ROCm, which reports the number of its architecture as a capability."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(CudaDevice, "name", name)
    device = object.__new__(CudaDevice)
    device.local_rank = 0
    return device


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "AMD Instinct of another kind"])
def test_an_amd_gpu_has_nothing_that_a_capability_promises(name, monkeypatch):
    device = _amd(monkeypatch, name)
    assert device.capability is None
    assert device.default_dtype == torch.bfloat16
    assert device.fp8_lacks("tensorwise")
    assert device.fp8_lacks("blockwise").endswith(
        f"an NVIDIA GPU of compute capability 9.0 (Hopper), and {name} has none"
    )
    assert name in device.fused_lacks()
    assert name in device.attention_lacks("flash")
    assert "has none" in device.grouped_lacks(torch.bfloat16, (16,))
    assert capability_of(SimpleNamespace(is_cuda=True, device="cuda:0")) == (0, 0)


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "reason"),
    [
        ("blockwise", (9, 0), "13.0", ""),
        ("blockwise", (9, 0), "12.8", "CUDA 12.9"),
        ("blockwise", (8, 9), "13.0", "and it has 8.9"),
        ("blockwise", (10, 0), "13.0", "has 10.0"),
        ("tensorwise", (8, 9), "12.8", ""),
        ("tensorwise", (12, 0), "13.0", ""),
        ("tensorwise", (8, 6), "13.0", "8.9 or more (Ada), and it has 8.6"),
    ],
)
def test_fp8_needs_a_gpu_and_a_cublas_with_the_recipe_s_scales(recipe, capability, cuda, reason, monkeypatch):
    monkeypatch.setattr(CudaDevice, "capability", capability)
    monkeypatch.setattr(CudaDevice, "name", "it")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    lacks = object.__new__(CudaDevice).fp8_lacks(recipe)
    assert reason in lacks
    assert bool(lacks) == bool(reason)
    assert not Device().fp8_lacks(recipe)
    assert "NVIDIA" in object.__new__(NpuDevice).fp8_lacks(recipe)


@pytest.mark.parametrize(("peers", "reason"), [((), ""), ((True, True), ""), ((True, False), "peer-to-peer")])
def test_fused_products_need_every_other_gpu_of_the_node(peers, reason, monkeypatch):
    device = _amd(monkeypatch, "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 + len(peers))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: peers[other - 1])
    assert reason in device.fused_lacks()
    assert bool(device.fused_lacks()) == bool(reason)


class NcclOptions:
    """ProcessGroupNCCL.Options, which a torch for CPUs has not."""

    def __init__(self):
        self.config = SimpleNamespace(max_ctas=32)
        self._timeout = timedelta()
        self.is_high_priority_stream = False


class HcclOptions:
    """ProcessGroupHCCL.Options."""

    hccl_config: dict[str, int]


@pytest.mark.parametrize(("queue", "blocks"), [(True, device_class("cuda").queue_blocks), (False, 32)])
def test_collectives_on_a_gpu_go_first_and_a_queue_s_kernels_get_few_blocks(queue, blocks):
    with patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), create=True):
        first, second = (object.__new__(CudaDevice).group_options(("pp",), HOUR, queue=queue) for _ in range(2))
    assert first is not second  # torch writes the ranks of a group into its options
    for options in (first, second):
        assert (options.config.max_ctas, options._timeout) == (blocks, HOUR)
        assert options.is_high_priority_stream is True  # whoever started the ranks


@pytest.mark.parametrize(
    ("names", "queue", "small"),
    [(("pp",), True, True), (("data",), False, True), (("sharding", "data"), False, False), (("ep",), False, False)],
)
def test_groups_of_an_npu_that_carry_little_get_small_buffers(names, queue, small):
    def npu(options):
        here = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=options))
        return patch.dict(sys.modules, torch_npu=SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=here)))

    HcclOptions.hccl_config = {}
    with npu(HcclOptions):
        options = object.__new__(NpuDevice).group_options(names, HOUR, queue=queue)
    assert (options is not None) == small
    if small:
        assert options.hccl_config == {"hccl_buffer_size": SMALL_HCCL_MIB}
    with npu(object):  # of a torch_npu that gives groups no choice
        assert object.__new__(NpuDevice).group_options(names, HOUR, queue=queue) is None


class _Profile:
    """What ``--profile`` calls, as torch and torch_npu name it; ``scripts/trace_npu.py`` asks the vendor's."""

    def __init__(self, activities):
        self.activities = activities


def test_an_npu_is_profiled_by_its_vendor(monkeypatch):
    activity = SimpleNamespace(CPU="host", NPU="device")
    npu = SimpleNamespace(profiler=SimpleNamespace(profile=_Profile, ProfilerActivity=activity))
    with patch.dict(sys.modules, torch_npu=npu):
        assert object.__new__(NpuDevice).new_profiler().activities == ["host", "device"]
    for kind, activities in ((Device, ["CPU"]), (CudaDevice, ["CPU", "CUDA"])):
        monkeypatch.setattr(torch.profiler, "profile", _Profile)
        assert [each.name for each in object.__new__(kind).new_profiler().activities] == activities


def test_a_cpu_asks_nothing_of_its_library():
    assert Device().group_options(("pp",), HOUR, queue=True) is None


def mapped(address: int, size: int) -> list[str]:
    """The lines of this process's map that hold the whole range."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [(line, *(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
    return [line for line, start, end in ranges if start <= address and address + size <= end]


class Driver:
    """Knows which memory is registered, as cudaHostRegister and cudaHostUnregister do."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        assert address % mmap.PAGESIZE == 0
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        size = self.registered.pop(address)
        assert mapped(address, size), "the memory was given back before the driver let go of it"
        return 0


@pytest.fixture
def driver(monkeypatch):
    found, errors = Driver(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "check_error", errors.append)
    yield found
    assert set(errors) == {0}


@needs_maps
def test_a_buffer_takes_what_it_needs_and_is_given_back(driver):
    numel = (3 << 20) // 4 + 5  # torch's allocator would take 4 MiB
    buffer = pinned_exactly(numel, torch.float32)
    assert driver.registered == {buffer.data_ptr(): 4 * numel}
    assert buffer.shape == (numel,)
    assert not buffer.any()
    part = buffer[1:].view(2, -1)
    buffer.fill_(2.0)
    del buffer
    gc.collect()
    assert driver.registered  # a view holds it
    assert part.sum() == 2.0 * (numel - 1)
    del part
    gc.collect()
    assert driver.registered == {}


@needs_maps
def test_memory_that_the_driver_refuses_is_an_error(driver, monkeypatch):
    def refuse(_: int) -> None:
        raise RuntimeError("cudaErrorMemoryAllocation")

    driver.cudaHostRegister(mmap.PAGESIZE, 1, 0)
    torch.cuda.check_error(0)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    launched: list[object] = []
    monkeypatch.setattr(torch, "ones", lambda *_, **options: launched.append(options["device"]))
    with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        pinned_exactly(1 << 20, torch.uint8)
    assert launched == ["cuda"]  # or the next kernel of training would raise the driver's answer
