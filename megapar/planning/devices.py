"""Kinds of devices as they are asked for on a line; the rows are in ``megapar/core/device/kinds.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from megapar.core.device.kinds import DeviceKind, kinds
from megapar.errors import Complaint, ConfigError

ALIASES: Mapping[str, str] = MappingProxyType(
    {"h800": "h800-80g", "h100": "h100-80g", "h200": "h200-141g", "a100": "a100-80g", "v100": "v100-32g"}
)


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
