"""What every device answers."""

from __future__ import annotations

import os

import pytest
import torch

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
