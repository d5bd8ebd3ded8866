"""The peak that MFU is a share of."""

from __future__ import annotations

import pytest
import torch

from megapar.core.device import peak
from megapar.core.device.base import Device
from megapar.core.device.peak import peak_flops


class Named(Device):
    """A CPU under the name of an accelerator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    @property
    def name(self) -> str:
        return self._name


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA H20", torch.bfloat16, 148),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989),
        ("Tesla V100-SXM2-32GB", torch.float16, 125),
        ("Ascend910B2", torch.bfloat16, 376),
        ("Ascend910B3", torch.bfloat16, 313),
        ("Ascend910B4", torch.bfloat16, 280),
    ],
)
def test_a_known_device_has_its_data_sheets_peak(name: str, dtype: torch.dtype, teraflops: float) -> None:
    assert peak_flops(Named(name), dtype) == (teraflops * 1e12, "table")


@pytest.mark.parametrize(("name", "dtype"), [("some CPU", torch.float32), ("Tesla V100-SXM2-32GB", torch.bfloat16)])
def test_what_the_table_lacks_is_measured(name: str, dtype: torch.dtype) -> None:
    flops, source = peak_flops(Named(name), dtype)
    assert source == "measured"
    assert flops > 1e7


def test_what_is_measured_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]

    def pass_by(more: float) -> float:
        seconds[0] += more
        return seconds[0]

    monkeypatch.setattr(peak.time, "perf_counter", lambda: pass_by(0.001))
    monkeypatch.setattr(torch, "mm", lambda a, b: pass_by(0.25))
    assert peak._gemm_flops(Device(), torch.float32, 8) == pytest.approx(2 * 8**3 / 0.25, rel=0.01)


@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, [512]), (torch.bfloat16, [128])])
def test_only_dtypes_that_may_be_slow_are_measured_by_a_small_product(
    dtype: torch.dtype, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a product of 128 x 128 may take a thousand times its time, in all of its tries."""
    asked: list[int] = []

    def slow(device: Device, dtype: torch.dtype, size: int) -> float:
        asked.append(size)
        return 1e8

    monkeypatch.setattr(peak, "_gemm_flops", slow)
    assert peak._measure(Device(), dtype) == 1e8
    assert asked == sizes
