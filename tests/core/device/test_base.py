"""What every device answers."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from megapar.core.device.attention.whole import capability_of
from megapar.core.device.base import Accelerator, Device
from megapar.core.device.cuda import CudaDevice
from megapar.core.device.npu import NpuDevice

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
    assert (
        device.fp8_lacks() == f"fp8 products need an NVIDIA GPU of compute capability 8.9 or more, and {name} has none"
    )
    assert name in device.fused_lacks()
    assert name in device.attention_lacks("flash")
    assert "has none" in device.grouped_lacks(torch.bfloat16, (16,))
    assert capability_of(SimpleNamespace(is_cuda=True, device="cuda:0")) == (0, 0)


@pytest.mark.parametrize(("peers", "reason"), [((), ""), ((True, True), ""), ((True, False), "peer-to-peer")])
def test_fused_products_need_every_other_gpu_of_the_node(peers, reason, monkeypatch):
    device = _amd(monkeypatch, "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 + len(peers))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: peers[other - 1])
    assert reason in device.fused_lacks()
    assert bool(device.fused_lacks()) == bool(reason)
