"""Parser of ``--device-kind``, whose figures flags may replace. The rows are in ``megapar/core/device/kinds.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType

from megapar.arguments import FLAGS, Config
from megapar.core.device.kinds import DeviceKind, kinds
from megapar.errors import Complaint, ConfigError
from megapar.machine import memory_bytes
from megapar.training.building.device_choices import FIGURES

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{"h800": "h800-80g", "h100": "h100-80g", "h200": "h200-141g", "a100": "a100-80g", "v100": "v100-32g"},
        **{"b200": "b200-180g", "b300": "b300-288g", "gb200": "gb200-186g", "gb300": "gb300-288g"},
        **{"a10": "a10-24g", "l4": "l4-24g", "l40s": "l40s-48g", "a6000": "rtx-a6000-48g", "mi300x": "mi300x-192g"},
        **{"rtx-4090": "rtx-4090-24g", "rtx-5090": "rtx-5090-32g", "4090": "rtx-4090-24g", "5090": "rtx-5090-32g"},
    }
)


def device_kind(name: str) -> DeviceKind:
    """Return the kind called ``name``. Raises ConfigError with the nearest names if there is none."""
    rows = kinds()
    key = name.lower().replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in rows:
        near = get_close_matches(key, list(rows), 3, 0.4)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        message = f"--device-kind {name} is not in the table."
        raise ConfigError([Complaint("device-kind", message, f"{hint}Choose one of {', '.join(rows)}.")])
    row = rows[key]
    return replace(row, memory_bytes=memory_bytes()) if row.kernels == "cpu" else row


def check_named(config: Config, kind: str) -> None:
    """Raise ConfigError if flags give figures of a device, and no ``--device-kind`` says whose other figures hold.

    Args:
        kind: The row that the command line or a file names; "" if a plan would take the default.
    """
    given = [FLAGS[name].spelling for name in FIGURES if getattr(config.runtime, name) is not None]
    if not given or kind:
        return
    message = (
        f"{', '.join(given)} {'replaces a figure' if len(given) == 1 else 'replace figures'} of a row of the device "
        "table, and no row is named. A plan also needs the bandwidth of the memory, the multiprocessors, the links and "
        "the size of a node, and does not guess them."
    )
    fix = f"Name the row that is nearest to the device with --device-kind: {', '.join(kinds())}."
    raise ConfigError([Complaint("device-figures", message, fix)])
