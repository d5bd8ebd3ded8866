"""Differences between the model of a checkpoint and another one. Does not import torch, so that refusals are fast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megapar.model.spec import STORED
from megapar.moe.sizes import MoeSizes
from megapar.schema.flag import spellings_of

SHOWN = 5


def differences(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the differing facts as text for the user, or "" if there are none.

    A size that an older checkpoint lacks has its default here.
    """
    expected = json.loads(json.dumps(expected))  # JSON has lists, not tuples
    kinds = [str(facts.get("kind"))[:100] for facts in (stored, expected)]
    if kinds[0] != kinds[1]:
        saved, current = (STORED[kind].title if kind in STORED else kind for kind in kinds)
        return f"there it is {saved}, here {current}"
    defaults = json.loads(json.dumps(STORED[kinds[0]].sizes.fact_defaults() if kinds[0] in STORED else {}))
    differing = _differing(stored, expected, defaults)
    names = _spellings(kinds[0])
    lines = [
        f"{names.get(name, name)} is {_shown(saved)} there and {_shown(current)} here"
        for name, saved, current in differing
    ]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


def _spellings(kind: str) -> dict[str, str]:
    """Return the flags of a model's facts by their names, those of experts with ``moe.`` before them."""
    of_experts = {f"moe.{name}": spelling for name, spelling in spellings_of(MoeSizes).items()}
    return {**(spellings_of(STORED[kind].sizes) if kind in STORED else {}), **of_experts}


def _differing(
    stored: Mapping[str, Any], expected: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(stored.keys() | expected.keys()):
        saved, current = stored.get(name), expected.get(name)
        if isinstance(saved, dict) and isinstance(current, dict):
            inner = _differing(saved, current, defaults.get(name) or {})
            yield from ((f"{name}.{field}", old, new) for field, old, new in inner)
        elif saved != current and not (name not in stored and name in defaults and current == defaults[name]):
            yield name, saved, current


def _shown(value: Any) -> str:
    return "given" if isinstance(value, dict) else "none" if value is None else f"{value!s:.100}"
