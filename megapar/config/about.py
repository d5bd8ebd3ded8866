"""Keys of a configuration file that describe its run and are not flags.

    script: pretrain_moe.py          the trainer that the flags are for
    device_kind: h100-80g            the device that `megapar plan` plans for
    assume: [fp8-mlp, dualpipe]      techniques of the published run that only `megapar plan` supports

The number of ranks is a flag, ``world_size``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megapar.errors import Complaint
from megapar.schema.flag import SCRIPTS

KEYS = ("script", "device_kind", "assume")


@dataclass(frozen=True)
class About:
    """Description of the run that a file is for. Keys that the file does not set are empty.

    Attributes:
        script: Entry script.
        device_kind: Device that ``megapar plan`` plans for.
        assume: Techniques that only ``megapar plan`` supports.
    """

    script: str = ""
    device_kind: str = ""
    assume: tuple[str, ...] = ()


def key_form(key: str) -> str:
    """Return a key in lower case with underscores, as in KEYS."""
    return key.lower().replace("-", "_")


def take(before: About, pairs: Iterable[tuple[str, Any]]) -> About:
    """Return ``before``, updated with the key and value pairs of a file."""
    given = {key_form(key): value for key, value in pairs if value is not None}
    items = given.get("assume", before.assume)
    return About(
        script=str(given.get("script", before.script)),
        device_kind=str(given.get("device_kind", before.device_kind)),
        assume=tuple(map(str, items if isinstance(items, (list, tuple)) else str(items).split())),
    )


def other_script(path: str, script: str, kind: str) -> Complaint | None:
    """Return a complaint if a file is for a different script than that of ``kind``, else None."""
    if script in ("", SCRIPTS[kind]):
        return None
    if script not in SCRIPTS.values():
        return Complaint("script", f"in {path}, script is {script!r}, not one of {', '.join(SCRIPTS.values())}.")
    other = next(name for name, file in SCRIPTS.items() if file == script)
    fix = f"Start {script}, or megapar pretrain {other}."
    return Complaint("script", f"{path} is for {script}, and this is {SCRIPTS[kind]}.", fix)


def unknown_to_trainers(assume: Sequence[str]) -> str:
    """Return the warning of a start from a file with these assumptions; "" without any."""
    if not assume:
        return ""
    return (
        f"the file assumes {', '.join(assume)}, which only `megapar plan` supports: the run trains the same model "
        "without them and needs more memory and time than planned"
    )
