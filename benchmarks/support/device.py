"""Kinds of devices that are fitted to what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megapar.core.device.kinds import DeviceKind


class StepParts(NamedTuple):
    """Seconds of a step without anything hidden.

    Attributes:
        computation: Its computation.
        messages: Its messages between nodes.
    """

    computation: float
    messages: float


def scaled(kind: DeviceKind, computation: float, between: float = 1.0) -> DeviceKind:
    """Return a kind whose computation and links between nodes are faster by these factors."""
    return replace(
        kind,
        flops={dtype: rate * computation for dtype, rate in kind.flops.items()},
        memory_bandwidth=kind.memory_bandwidth * computation,
        between=kind.between * between,
    )


def fitted(kind: DeviceKind, plan: Callable[[DeviceKind], StepParts], measured: StepParts) -> DeviceKind:
    """Return the kind, scaled so that a plan's step has the measured parts."""
    planned = plan(kind)
    return scaled(kind, planned.computation / measured.computation, planned.messages / measured.messages)


def link_bytes(bits: float, ranks: int = 1) -> float:
    """Return the bytes per second of each of the ranks that share a link of so many bits per second."""
    return bits / 8 / ranks
