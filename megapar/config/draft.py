"""Settings while a command line and files are being read, with the complaints collected so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.config.about import About
from megapar.errors import Complaint


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
        warnings: Warnings to print.
        bad: Field names of bad values.
        cuts_parameters: A file sets segments (buckets) as PaddlePaddle's static graphs do, where sharding includes
            parameters.
        about: Keys of the files that are not flags.
        foreign: A file is for the other trainer; none of its keys was read.
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
