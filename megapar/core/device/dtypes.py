"""Dtypes derived from that of the run, or from the device."""

from __future__ import annotations

import torch


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return max(fp32, dtype), which replaces fp32 in a run of this dtype."""
    return torch.promote_types(dtype, torch.float32)


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype of counts and sums over a global batch: fp64, as fp32 has too few integers; fp32 on Ascend."""
    return torch.float32 if device.type == "npu" else torch.float64
