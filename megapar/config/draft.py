"""Settings while a command line and files are being read, with the complaints collected so far.

Keys of a configuration file that describe its run and are not flags:

    script: pretrain_moe.py          the trainer that the flags are for
    device_kind: h100-80g            the device that `megapar plan` plans for
    assume: [fp8-mlp, dualpipe]      techniques of the published run that only `megapar plan` supports

The number of ranks is a flag, ``world_size``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapar.errors import Complaint
from megapar.schema.flag import SCRIPTS

KEYS = ("script", "device_kind", "assume")


@dataclass(frozen=True)
class About:
    """Description of the run that a file is for. Keys that the file does not set are empty."""

    script: str = ""
    device_kind: str = ""
    assume: tuple[str, ...] = ()

    def updated(self, pairs: Iterable[tuple[str, Any]]) -> About:
        """Return this description, updated with the key and value pairs of a file."""
        given = {key_form(key): value for key, value in pairs if value is not None}
        items = given.get("assume", self.assume)
        return About(
            script=str(given.get("script", self.script)),
            device_kind=str(given.get("device_kind", self.device_kind)),
            assume=tuple(map(str, items if isinstance(items, (list, tuple)) else str(items).split())),
        )


def key_form(key: str) -> str:
    """Return a key in lower case with underscores, as in KEYS."""
    return key.lower().replace("-", "_")


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


def is_given(origin: str | None) -> bool:
    """Return True if a value with this origin was set on the command line or in a file."""
    return is_from_file(origin) or origin == "flag"


def is_from_file(origin: str | None) -> bool:
    """Return True if a value with this origin was set in a file, the only one or one of several."""
    return origin is not None and (origin == "file" or origin.startswith("file "))


@dataclass
class Draft:
    """Settings read so far.

    Attributes:
        kind: ``moe`` or ``ernie``.
        environ: Environment in which ``$NAME`` in paths is looked up.
        values: Valid values by field name; bad ones are absent.
        origins: By field name, ``default``, ``flag``, ``derived``, or ``file`` (``file NAME`` if there are several).
        complaints: Problems found.
        bad: Field names of bad values.
        cuts_parameters: A file sets segments (buckets) as PaddlePaddle's static graphs do, where sharding includes
            parameters.
        about: Keys of the files that are not flags.
        foreign: A file is for the other trainer, or a config.json of transformers; none of its keys was read.
    """

    kind: str
    environ: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    complaints: list[Complaint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    cuts_parameters: bool = False
    about: About = field(default_factory=About)
    foreign: bool = False

    def forget(self, name: str) -> None:
        """Remove a field, as if it had not been set."""
        self.values.pop(name, None)
        self.origins.pop(name, None)

    def complain(self, rule: str, message: str, fix: str = "") -> None:
        """Add a complaint, unless the same one is present already."""
        complaint = Complaint(rule, message, fix)
        if complaint not in self.complaints:
            self.complaints.append(complaint)
