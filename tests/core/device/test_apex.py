"""Which package named apex is there, and its kernels by a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megapar.core.device.accelerators import CudaDevice
from megapar.core.device.apex import add_product_apex, apex_installed, apex_lacks, layer_norm_apex, rms_norm_apex
from megapar.core.device.base import Device
from megapar.core.device.dtypes import add_product_reference
from megapar.core.device.layer_ops import rms_norm_reference
from tests.support import apex


@pytest.mark.parametrize(
    ("files", "installed", "lacks"),
    [
        ([], "", "no package apex is installed"),
        (["apex/__init__.py", "apex/models.py"], "", "not NVIDIA's package but PyPI's of the same name"),
        (["apex/__init__.py", "apex/optimizers/__init__.py"], "apex", "installed without apex.normalization"),
    ],
)
def test_packages_of_that_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], installed: str, lacks: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert apex_installed() == installed
    assert lacks in apex_lacks()


@pytest.mark.parametrize("without", apex.MODULES)
def test_an_installation_lacks_what_it_was_built_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    apex.installed(tmp_path, monkeypatch, without)
    if without != "apex.normalization":  # its module is entered by itself
        assert f"installed without {without} (ModuleNotFoundError" in apex_lacks()


def test_a_whole_installation_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apex.installed(tmp_path, monkeypatch)
    assert apex_lacks() == ""


def test_only_an_nvidia_gpu_runs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the device is cpu" in Device().apex_lacks()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    device = object.__new__(CudaDevice)
    monkeypatch.setattr(CudaDevice, "name", "MI300X", raising=False)
    assert "the device is MI300X" in device.apex_lacks()


def test_norms_equal_their_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = apex.installed(tmp_path, monkeypatch)
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(8), torch.randn(8)
    torch.testing.assert_close(rms_norm_apex(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    torch.testing.assert_close(layer_norm_apex(x, weight, bias, 1e-5), F.layer_norm(x, (8,), weight, bias, 1e-5))
    assert calls == ["rms_norm", "layer_norm"]


@pytest.mark.parametrize(
    ("begins", "dtype", "strided", "called"),
    [
        (False, torch.bfloat16, False, True),
        (True, torch.bfloat16, False, False),
        (False, torch.float32, False, False),
        (False, torch.bfloat16, True, False),
    ],
)
def test_a_product_is_added_by_its_kernel_or_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool, dtype: torch.dtype, strided: bool, called: bool
) -> None:
    calls = apex.installed(tmp_path, monkeypatch)
    d_output, rows = torch.randn(6, 4).to(dtype), torch.randn(6, 16).to(dtype)
    rows = rows[:, ::2] if strided else rows[:, :8].contiguous()
    total = torch.randn(4, 8)
    want = add_product_reference(total.clone(), d_output.t().float(), rows.float(), begins=begins)
    monkeypatch.setattr("megapar.core.device.apex.add_product_wide", add_product_reference)  # torch's takes CUDA only
    got = add_product_apex(total, d_output.t(), rows, begins=begins)
    assert got is total
    torch.testing.assert_close(got, want, rtol=1e-2, atol=5e-2)
    assert calls == ["product"] * called
