"""Dtypes that follow from the run's."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """max(fp32, dtype): what "fp32" means in a run of this dtype."""
    return torch.promote_types(dtype, torch.float32)
