"""Parser of ``--device-kind``. The rows are in ``megapar/core/device/kinds.yaml``.

Tested in ``tests/tools/test_mistakes.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from megapar.core.device.kinds import DeviceKind, kinds
from megapar.errors import Complaint, ConfigError

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{"h800": "h800-80g", "h100": "h100-80g", "h200": "h200-141g", "a100": "a100-80g", "v100": "v100-32g"},
        **{"b200": "b200-180g", "b300": "b300-288g", "gb200": "gb200-186g", "gb300": "gb300-288g"},
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
    return rows[key]
