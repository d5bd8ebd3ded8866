"""The tables of arguments that other frameworks declare: tables/*.tsv, see scripts/argument_tables.py."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "tables"


class Declared(NamedTuple):
    """An argument as its framework has it; kind: value, on, off or both."""

    name: str
    default: str
    choices: tuple[str, ...]
    kind: str

    def words(self, value: str) -> list[str]:
        """The argument on a line; a switch stands alone."""
        return [f"--{self.name}", *(value.split(",") if self.kind == "value" and value else [])]


def declared(name: str) -> list[Declared]:
    """The rows of ``tables/NAME.tsv``."""
    found = []
    for line in (FOLDER / f"{name}.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            argument, default, choices, kind = line.split("\t")
            found.append(Declared(argument, default, tuple(filter(None, choices.split(","))), kind))
    return found
