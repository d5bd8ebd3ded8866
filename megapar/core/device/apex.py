"""NVIDIA apex: whether it can be used here, and its kernels of norms and weight gradients (docs/devices.md).

Sources, of NVIDIA/apex: ``apex/normalization/fused_layer_norm.py``, ``csrc/megatron/fused_weight_gradient_dense.cpp``.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapar.core.device.compiled import counted
from megapar.core.device.dtypes import add_product_wide

# Folders of NVIDIA's package, and of the package for Ascend that is derived from it.
_FOLDERS = ("optimizers", "multi_tensor_apply")
_NORMS, _PRODUCT = "apex.normalization.fused_layer_norm", "fused_weight_gradient_mlp_cuda"
# What --apex calls, and the compiled modules below it, which an installation without its CUDA extensions lacks.
_NEEDED = (
    (_NORMS, "fused_rms_norm_affine"),
    (_NORMS, "fused_layer_norm_affine"),
    ("fused_layer_norm_cuda", ""),
    ("apex.optimizers", "FusedAdam"),
    ("amp_C", "multi_tensor_adam_capturable"),
    (_PRODUCT, "wgrad_gemm_accum_fp32"),
)


def apex_installed() -> str:
    """Return the name and version of a package ``apex`` that looks like NVIDIA's, or ""."""
    spec = importlib.util.find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not any((folder / part).is_dir() for folder in folders for part in _FOLDERS):
        return ""
    return _named()


def apex_lacks() -> str:
    """Return the reason why NVIDIA's apex cannot be used, with what is installed, or "" if it can. Imports it."""
    if importlib.util.find_spec("apex") is None:
        return "no package apex is installed"
    if not apex_installed():
        return f"{_named()} is installed, which is not NVIDIA's package but PyPI's of the same name"
    for module, name in _NEEDED:
        try:
            found = importlib.import_module(module)
        except Exception as error:  # a kernel built for another torch raises anything
            return f"{_named()} is installed without {module} ({type(error).__name__}: {error})"
        if name and not hasattr(found, name):
            return f"{_named()} is installed, whose {module} has no {name}"
    return ""


def _named() -> str:
    try:
        return f"apex {version('apex')}"
    except PackageNotFoundError:
        return "apex"


@counted(2)
def rms_norm_apex(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute ``layer_ops.rms_norm_reference`` by one kernel, which rounds once, after the weight."""
    y: Tensor = _function(_NORMS, "fused_rms_norm_affine")(x.to(weight.dtype), weight, weight.shape, epsilon)
    return y.to(x.dtype)


@counted(2)
def layer_norm_apex(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Compute the layer norm of x over its last dim by one kernel."""
    wide, shift = x.to(weight.dtype), bias.to(weight.dtype)
    y: Tensor = _function(_NORMS, "fused_layer_norm_affine")(wide, weight, shift, weight.shape, epsilon)
    return y.to(x.dtype)


def add_product_apex(total: Tensor, a: Tensor, b: Tensor, *, begins: bool) -> Tensor:
    """Compute ``dtypes.add_product_reference``; sums in fp32 of 16-bit products by apex's kernel.

    The kernel adds only, to a contiguous sum, the product of d_output [K, M] transposed and input [K, N]. What begins a
    sum or lies otherwise in memory goes to torch's.
    """
    d_output = a.t()
    narrow = total.dtype == torch.float32 and a.dtype.itemsize == 2 and b.dtype == a.dtype
    if begins or not (narrow and total.is_contiguous() and d_output.is_contiguous() and b.is_contiguous()):
        return add_product_wide(total, a, b, begins=begins)
    _function(_PRODUCT, "wgrad_gemm_accum_fp32")(b, d_output, total)
    return total


def fused_adam() -> Any:
    """Return apex's class of AdamW."""
    return _function("apex.optimizers", "FusedAdam")


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
