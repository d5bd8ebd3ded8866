"""What a configuration file says of the run it was written for, beside the flags: keys that no line has.

    script: pretrain_moe.py          the trainer whose flags it holds
    device_kind: h100-80g            what `megapar plan` plans for
    assume: [fp8-mlp, dualpipe]      techniques of the published run that only `megapar plan` knows

How many ranks it was written for is a flag, ``world_size``. Standard library and PyYAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megapar.errors import Complaint
from megapar.schema.flag import SCRIPTS

KEYS = ("script", "device_kind", "assume")
# Of an assumed technique that makes another model, not another way to compute the same one.
ANOTHER_MODEL = ("latent-attention",)


@dataclass(frozen=True)
class About:
    """Empty where the file does not say."""

    script: str = ""
    device_kind: str = ""
    assume: tuple[str, ...] = ()


def spelled(key: str) -> str:
    """A key with underscores, as it is listed here."""
    return key.lower().replace("-", "_")


def take(before: About, pairs: Iterable[tuple[str, Any]]) -> About:
    """What key and value pairs of a file say, over what is known already."""
    said = {spelled(key): value for key, value in pairs if value is not None}
    items = said.get("assume", before.assume)
    return About(
        script=str(said.get("script", before.script)),
        device_kind=str(said.get("device_kind", before.device_kind)),
        assume=tuple(map(str, items if isinstance(items, (list, tuple)) else str(items).split())),
    )


def other_script(path: str, script: str, kind: str) -> Complaint | None:
    """The complaint about a file for another script than that of ``kind``."""
    if script in ("", SCRIPTS[kind]):
        return None
    if script not in SCRIPTS.values():
        return Complaint("script", f"in {path}, script is {script!r}, none of {', '.join(SCRIPTS.values())}.")
    return Complaint("script", f"{path} is for {script}, and this is {SCRIPTS[kind]}.", f"Start {script}.")


def unknown_to_trainers(assume: Sequence[str]) -> tuple[Complaint | None, str]:
    """Of a file with these assumptions: why it cannot be trained, or else the warning of what a run does without."""
    if not assume:
        return None, ""
    other = [word for word in assume if word.partition(":")[0] in ANOTHER_MODEL]
    if other:
        message = f"this file is for `megapar plan` only: it assumes {', '.join(other)}, which no trainer here has"
        fix = "Plan it with `megapar plan --config FILE`; what would start here is another model."
        return Complaint("assume", f"{message}.", fix), ""
    return None, (
        f"the file assumes {', '.join(assume)}, which only `megapar plan` knows: the run does without, takes more "
        "memory and time than that plan says, and has the same model"
    )
