"""Dtypes of a run, of its computation and of the reduction of gradients, and the loss scaling of fp16."""

from __future__ import annotations

from dataclasses import replace

import torch

from megapar.arguments import Config
from megapar.core.device.base import Device
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.optimizer.loss_scale import LossScale
from megapar.errors import Complaint, ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def compute_dtype(config: Config, device: Device) -> torch.dtype:
    """Return ``--dtype``, or for ``auto`` the default of the device.

    Raises ConfigError if the default is fp16 and another flag needs bf16. Without ``auto`` the rules check this.
    """
    dtype = DTYPES.get(config.training.dtype, device.default_dtype)
    if dtype == torch.float16 and config.sharding.grad_reduce_dtype == "bf16":
        message = (
            "--grad-reduce-dtype bf16 would lose the precision of the gradients of an fp16 run, and the default dtype "
            f"of {device.name} is fp16."
        )
        raise ConfigError([Complaint("reduce-dtype-wide", message, "Leave --grad-reduce-dtype out.")])
    return dtype


def dtype_name(config: Config, device: Device) -> str:
    """Return the name of the compute dtype, as ``--dtype`` writes it."""
    computed = compute_dtype(config, device)
    return next(name for name, dtype in DTYPES.items() if dtype == computed)


def with_dtype(config: Config, device: Device) -> Config:
    """Return the configuration with the compute dtype in place of auto; the row of a device may be another's."""
    return replace(config, training=replace(config.training, dtype=dtype_name(config, device)))


def reduce_dtype(config: Config, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are reduced: ``--grad-reduce-dtype``. "fp32" is that of master weights."""
    chosen = DTYPES[config.sharding.grad_reduce_dtype]
    return at_least_fp32(dtype) if chosen == torch.float32 else chosen


def make_loss_scale(config: Config, device: Device) -> LossScale | None:
    """Return the dynamic loss scaling if the compute dtype is fp16, else None."""
    training = config.training
    if compute_dtype(config, device) != torch.float16:
        return None
    return LossScale(
        value=training.initial_loss_scale,
        minimum=training.min_loss_scale,
        factor=training.loss_scale_factor,
        window=training.loss_scale_window,
        hysteresis=training.hysteresis,
    )
