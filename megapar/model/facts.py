"""Differences between the model of a checkpoint and another one. Does not import torch, so that refusals are fast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megapar.model.spec import STORED

SHOWN = 5


def differences(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the differing facts as text for the user, or "" if there are none.

    A size that is newer than the checkpoint is missing there, and its default here agrees with that.
    """
    expected = json.loads(json.dumps(expected))  # JSON has lists, not tuples
    kinds = [str(facts.get("kind"))[:100] for facts in (stored, expected)]
    if kinds[0] != kinds[1]:
        there, here = (STORED[kind].title if kind in STORED else kind for kind in kinds)
        return f"there it is {there}, here {here}"
    defaults = json.loads(json.dumps(STORED[kinds[0]].sizes.fact_defaults() if kinds[0] in STORED else {}))
    apart = _apart(stored, expected, defaults)
    found = [f"{name} is {_shown(there)} there and {_shown(here)} here" for name, there, here in apart]
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _apart(
    stored: Mapping[str, Any], expected: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(stored.keys() | expected.keys()):
        there, here = stored.get(name), expected.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            inner = _apart(there, here, defaults.get(name) or {})
            yield from ((f"{name}.{field}", one, other) for field, one, other in inner)
        elif there != here and not (name not in stored and name in defaults and here == defaults[name]):
            yield name, there, here


def _shown(value: Any) -> str:
    return "given" if isinstance(value, dict) else "none" if value is None else f"{value!s:.100}"
