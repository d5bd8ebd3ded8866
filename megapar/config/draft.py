"""Settings on their way from a line and a file to a configuration, with every complaint so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.config.about import About
from megapar.errors import Complaint


def is_given(origin: str | None) -> bool:
    """Whether a value with this origin was asked for, on the line or in a file."""
    return is_from_file(origin) or origin == "flag"


def is_from_file(origin: str | None) -> bool:
    """Whether a value with this origin is from a file, be it the only one or one of several."""
    return origin is not None and origin.partition(" ")[0] == "file"


@dataclass
class Draft:
    """What was asked for.

    environ: what ``$NAME`` in paths is looked up in. values: good values by field name (a bad one is absent). origins:
    by field name, ``default``, ``flag``, ``derived``, or ``file`` (``file NAME`` of several). cuts_parameters: a file
    speaks of segments as PaddlePaddle's static graphs do, in which sharding cuts parameters, too. about: what the files
    say of themselves. foreign: one is for the other trainer, and nothing of it is here.
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
        """A field is as if nobody had set it."""
        self.values.pop(name, None)
        self.origins.pop(name, None)

    def complain(self, rule: str, message: str, fix: str = "") -> None:
        """Keep one complaint; the same one is kept once."""
        complaint = Complaint(rule, message, fix)
        if complaint not in self.complaints:
            self.complaints.append(complaint)
