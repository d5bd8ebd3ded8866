"""Kernels compiled for a Hopper GPU and for an MI300X, which the machine need not have."""

from __future__ import annotations

import pkgutil

import pytest

from megapar.core.device import triton_kernels

HOPPER, MI300X = 90, "gfx942"
MODULES = sorted(info.name for info in pkgutil.iter_modules(triton_kernels.__path__))


@pytest.mark.parametrize("module", MODULES)
def test_kernels_fit_a_hopper_gpu_without_spills(module, capsys):
    pytest.importorskip("triton")
    from tests.core.device.triton_kernels.kernels import KERNELS

    for name, kernel in KERNELS[module].items():
        resources = kernel.resources(HOPPER)
        with capsys.disabled():
            print(f"\n{module}, {name}: {resources}")
        assert resources.spilled == 0
        blocks = 3 if name.startswith("norm") else 4  # resident per SM; a norm keeps three sums of all columns
        assert resources.registers <= 65_536 // (32 * kernel.warps) // blocks
        assert resources.shared <= 227 * 1024 // blocks


@pytest.mark.parametrize("module", [name for name in MODULES if name != "block_casts"])
def test_kernels_fit_an_mi300x_whose_warps_are_twice_as_wide(module, capsys):
    """All except the fp8 kernels: an MI300X has a different fp8 format."""
    pytest.importorskip("triton")
    from tests.core.device.triton_kernels.kernels import KERNELS

    for name, kernel in KERNELS[module].items():
        resources = kernel.resources_on_amd(MI300X)
        with capsys.disabled():
            print(f"\n{module}, {name}: {resources}")
        assert resources.spilled == 0
        assert 64 * kernel.warps <= 1024  # threads of a block
        assert resources.registers <= 512 // max(1, 64 * kernel.warps // 256)  # four SIMDs, 512 per lane on each
        assert resources.shared <= 64 * 1024
