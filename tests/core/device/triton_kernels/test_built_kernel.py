"""Kernels compiled for a Hopper GPU, which the machine need not have."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from megapar.core.device import triton_kernels

HOPPER = 90
MODULES = sorted(info.name for info in pkgutil.iter_modules(triton_kernels.__path__) if info.name != "built_kernel")


@pytest.mark.parametrize("module", MODULES)
def test_kernels_fit_a_hopper_gpu_without_spills(module, capsys):
    pytest.importorskip("triton")
    for kernel in importlib.import_module(f"{triton_kernels.__name__}.{module}").KERNELS:
        resources = kernel.resources(HOPPER)
        with capsys.disabled():
            print(f"\n{kernel.name}: {resources}")
        assert resources.spilled == 0
        assert resources.registers <= 65_536 // (32 * kernel.warps) // 4  # four blocks of it run on a multiprocessor
        assert resources.shared <= 227 * 1024 // 4
