"""Kinds of devices: what one can hold, compute and send. The rows are in ``devices.yaml``, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megapar.core.units import GIBIBYTE
from megapar.errors import Complaint, ConfigError

GIGA, TERA = 10**9, 10**12

ALIASES: Mapping[str, str] = MappingProxyType(
    {"h800": "h800-80g", "h100": "h100-80g", "h200": "h200-141g", "a100": "a100-80g", "v100": "v100-32g"}
)


@dataclass(frozen=True)
class DeviceKind:
    """One row. memory_bytes: of one device. memory_bandwidth, inside, between: bytes per second, the last two of what
    one device can send to others of its node and to other nodes. flops: FLOP/s by dtype. node: devices per node.
    kernels: which forms of operators run there.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    node: int
    inside: float
    between: float
    kernels: str
    source: str

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


@cache
def kinds() -> Mapping[str, DeviceKind]:
    """All rows by name."""
    import yaml

    rows = yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _kind(name, row) for name, row in rows.items()})


def device_kind(name: str) -> DeviceKind:
    """The row called ``name``. Raises ConfigError with the nearest names."""
    rows = kinds()
    asked = name.lower().replace("_", "-")
    asked = ALIASES.get(asked, asked)
    if asked not in rows:
        near = get_close_matches(asked, list(rows), 3, 0.4)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        message = f"--device-kind {name} is not in the table."
        raise ConfigError([Complaint("device-kind", message, f"{hint}Known are {', '.join(rows)}.")])
    return rows[asked]


def _kind(name: str, row: Mapping[str, Any]) -> DeviceKind:
    return DeviceKind(
        name=name,
        memory_bytes=round(row["memory_gib"] * GIBIBYTE),
        memory_bandwidth=row["memory_bandwidth"] * GIGA,
        flops=MappingProxyType({dtype: rate * TERA for dtype, rate in row["flops"].items()}),
        node=row["node"],
        inside=row["inside"] * GIGA,
        between=row["between"] * GIGA,
        kernels=row["kernels"],
        source=row["source"],
    )
