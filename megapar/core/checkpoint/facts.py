"""What a checkpoint says of its model, and where another model differs. No torch: a refusal takes no second."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
SHOWN = 5
_MODELS = {
    "DecoderSizes": "a decoder, which pretrain_moe.py trains",
    "ErnieSizes": "an ERNIE encoder, which pretrain_ernie.py trains",
    "Ernie3Sizes": "ERNIE 3.0, which pretrain_ernie.py trains with --ernie-model ernie3",
}


def stored_facts(root: Path, iteration: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """(folder, what ``layout.json`` says of the model) of an iteration, or of the latest checkpoint under ``root``.

    None where that is not to be had at a glance: whoever loads the checkpoint says what is wrong with it.
    """
    try:
        name = (root / "latest").read_text(encoding="utf-8") if iteration is None else f"iter_{iteration:07d}"
        if not re.fullmatch(r"iter_[0-9]{7,18}", name.strip()):
            return None
        folder = root / name.strip()
        with (folder / "layout.json").open("rb") as file:
            head = file.read(MAX_BYTES).split(b"\n", 4)
        text = next(line for line in head if line.startswith(b'"model": '))
        facts = json.loads(text.partition(b": ")[2].rstrip(b","))
    except (OSError, ValueError, RecursionError, StopIteration):
        return None
    return (folder, facts) if isinstance(facts, dict) else None


def differences(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The facts that differ, as a person reads them; "" where none does."""
    expected = json.loads(json.dumps(expected))  # tuples are lists in a file
    kinds = [str(facts.get("kind"))[:100] for facts in (stored, expected)]
    if kinds[0] != kinds[1]:
        there, here = (_MODELS.get(kind, kind) for kind in kinds)
        return f"there it is {there}, here {here}"
    found = [
        f"{name} is {_shown(there)} there and {_shown(here)} here" for name, there, here in _apart(stored, expected)
    ]
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _apart(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(stored.keys() | expected.keys()):
        there, here = stored.get(name), expected.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            yield from ((f"{name}.{inner}", one, other) for inner, one, other in _apart(there, here))
        elif there != here:
            yield name, there, here


def _shown(value: Any) -> str:
    return "given" if isinstance(value, dict) else "none" if value is None else f"{value!s:.100}"
