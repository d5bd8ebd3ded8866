"""Settings on their way from a line and a file to a configuration, with every complaint so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megapar.config.about import About
from megapar.errors import Complaint


@dataclass
class Draft:
    """What was asked for. values: good values by field name (a bad one is absent). origins: by field name.

    about: what the file says of itself. foreign: it is for the other trainer, and nothing of it is here.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    complaints: list[Complaint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    about: About = field(default_factory=About)
    foreign: bool = False

    def complain(self, rule: str, message: str, fix: str = "") -> None:
        """Keep one complaint; the same one is kept once."""
        complaint = Complaint(rule, message, fix)
        if complaint not in self.complaints:
            self.complaints.append(complaint)
