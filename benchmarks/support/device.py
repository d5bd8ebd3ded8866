"""Kinds of devices that are fitted to what was measured."""

from __future__ import annotations

from dataclasses import replace

from megapar.core.device.kinds import DeviceKind


def scaled(kind: DeviceKind, computation: float, between: float) -> DeviceKind:
    """Return a kind whose computation and links between nodes are faster by these factors."""
    return replace(
        kind,
        flops={dtype: rate * computation for dtype, rate in kind.flops.items()},
        memory_bandwidth=kind.memory_bandwidth * computation,
        between=kind.between * between,
    )
