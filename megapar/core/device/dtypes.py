"""Dtypes that follow from the run's, or from the device."""

from __future__ import annotations

import torch


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """max(fp32, dtype): what "fp32" means in a run of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def widest(device: torch.device) -> torch.dtype:
    """Of counts and sums over a global batch, which outgrow fp32's integers; Ascend has no fp64 arithmetic."""
    return torch.float32 if device.type == "npu" else torch.float64
