"""The figures of a run's devices: a row of the device table, with those that flags give. Does not import torch."""

from __future__ import annotations

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind, kind_called, kind_of

FIGURES = ("device_tflops", "device_memory_gib", "link_gb", "network_gb")
"""Flags that give a figure of a device."""


def with_figures(kind: DeviceKind, config: Config) -> DeviceKind:
    """Return the row with the figures that the flags of ``FIGURES`` give."""
    given = config.runtime
    dtype = kind.default_dtype if config.training.dtype == "auto" else config.training.dtype
    return kind.with_figures(
        dtype,
        tflops=given.device_tflops,
        memory_gib=given.device_memory_gib,
        link_gb=given.link_gb,
        network_gb=given.network_gb,
    )


def kind_of_run(config: Config, device_type: str, name: str) -> DeviceKind:
    """Return the row of a run's devices, with the figures of flags.

    Args:
        device_type: torch's device type.
        name: Name of the device, as its driver reports it; "" if the device is not here.
    """
    return with_figures(kind_of(device_type, name), config)


def unknown_device(config: Config, device_type: str, name: str) -> str:
    """Return a sentence about a device that has no row, whose figures are then another row's; "" if it has one."""
    if kind_called(name) is not None:
        return ""
    assumed = kind_of_run(config, device_type, name)
    return (
        f"device: {name} is not in the device table; choices that depend on speed take the figures of {assumed.title}, "
        "and MFU that of --device-tflops or a measured one"
    )
