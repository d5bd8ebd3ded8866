"""Kinds of devices: what one can hold, compute and send, and at which sizes its class works well.

The run and the planner read the same rows, from ``kinds.yaml``, with their sources. Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megapar.core.units import GIBIBYTE, MEGABYTE
from megapar.errors import Complaint, ConfigError

GIGA, TERA, MICRO = 10**9, 10**12, 1e-6
LINK_SHARE = 0.80  # what links reach of their data sheets; what predictions are fitted with
# All units at work reach so much of the data sheet, and a product starts and ends in so long (a model, not measured).
_TILE_SHARE, _START_SECONDS = 0.80, 2e-6
# What stands for a device of a class whose name nobody knows.
_UNNAMED = MappingProxyType({"cuda": "h100-80g", "npu": "ascend-910b", "cpu": "cpu"})


@dataclass(frozen=True)
class DeviceClass:
    """What devices with the same kernels do alike, in bytes and seconds; ``kinds.yaml`` says what each is."""

    tile: tuple[int, int]
    launch_seconds: float
    latency_seconds: float
    pieces: int
    piece_bytes: int
    least_rows: int
    batched: bool
    hides: bool
    logits_bytes: int


@dataclass(frozen=True)
class DeviceKind:
    """One row. memory_bytes: of one device. memory_bandwidth, inside, between: bytes per second, the last two of what
    one device can send to others of its node and to other nodes. flops: FLOP/s by dtype. units: that share a product.
    node: devices per node. kernels: which forms of operators run there. drivers_say: parts of its names there.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    units: int
    node: int
    inside: float
    between: float
    kernels: str
    source: str
    drivers_say: tuple[str, ...]

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products. Raises ConfigError where the device has none in this dtype."""
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise ConfigError([Complaint("device-dtype", f"{self.name} has no {dtype} products; it has {known}.")])
        return self.flops[dtype]

    @property
    def default_dtype(self) -> str:
        """What --dtype auto would choose there."""
        return "fp32" if self.kernels == "cpu" else "bf16" if "bf16" in self.flops else "fp16"

    @property
    def of(self) -> DeviceClass:
        """What it has in common with others."""
        return _tables()[1][self.kernels]

    def product_seconds(self, rows: int, inner: int, columns: int, dtype: str, batches: int = 1) -> float:
        """One product [rows, inner] @ [inner, columns], or ``batches`` of them in one kernel.

        The units compute tiles in waves; a wave that is not full takes as long as a full one.
        """
        high, wide = self.of.tile
        waves = -(-batches * -(-rows // high) * -(-columns // wide) // self.units)
        tile_seconds = 2 * high * wide * inner / (self.peak(dtype) * _TILE_SHARE / self.units)
        return max(waves * tile_seconds + _START_SECONDS, self.of.launch_seconds)

    def send_seconds(self, size: float) -> float:
        """A collective in which each rank sends so many bytes to others of its node; 0 for none."""
        return size / (self.inside * LINK_SHARE) + self.of.latency_seconds if size else 0.0


def kinds() -> Mapping[str, DeviceKind]:
    """All rows by name."""
    return _tables()[0]


def device_class(device_type: str) -> DeviceClass:
    """Of torch's device type; the CPU's where there is none, as of meta tensors."""
    classes = _tables()[1]
    return classes.get(device_type, classes["cpu"])


def kind_called(device: str) -> DeviceKind | None:
    """The row whose devices' drivers give them this name; the longest part that fits counts."""
    fits = {part: kind for kind in kinds().values() for part in kind.drivers_say if part.lower() in device.lower()}
    return fits[max(fits, key=len)] if fits else None


def kind_of(device_type: str, name: str) -> DeviceKind:
    """The row of a device that is there: by its drivers' name for it, or what stands for its class (cuda, npu, cpu)."""
    return kind_called(name) or kinds()[_UNNAMED[device_type]]


@cache
def _tables() -> tuple[Mapping[str, DeviceKind], Mapping[str, DeviceClass]]:
    import yaml

    text = Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8")
    rows, classes = yaml.safe_load_all(text)
    return (
        MappingProxyType({name: _kind(name, row) for name, row in rows.items()}),
        MappingProxyType({name: _class(row) for name, row in classes.items()}),
    )


def _kind(name: str, row: Mapping[str, Any]) -> DeviceKind:
    return DeviceKind(
        name=name,
        memory_bytes=round(row["memory_gib"] * GIBIBYTE),
        memory_bandwidth=row["memory_bandwidth"] * GIGA,
        flops=MappingProxyType({dtype: rate * TERA for dtype, rate in row["flops"].items()}),
        units=row["units"],
        node=row["node"],
        inside=row["inside"] * GIGA,
        between=row["between"] * GIGA,
        kernels=row["kernels"],
        source=row["source"],
        drivers_say=tuple(row["drivers_say"]),
    )


def _class(row: Mapping[str, Any]) -> DeviceClass:
    high, wide = row["tile"]
    return DeviceClass(
        tile=(high, wide),
        launch_seconds=row["launch"] * MICRO,
        latency_seconds=row["latency"] * MICRO,
        pieces=row["pieces"],
        piece_bytes=row["piece_mib"] * MEGABYTE,
        least_rows=row["least_rows"],
        batched=row["batched"],
        hides=row["hides"],
        logits_bytes=row["logits_mib"] * MEGABYTE,
    )
