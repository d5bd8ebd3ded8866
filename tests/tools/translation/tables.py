"""The tables of arguments that other frameworks declare: tables/*.tsv, see scripts/argument_tables.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from megapar.config.read import normal, spellings
from megapar.config.values import convert
from megapar.tools.translation.translated import translate

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


def values_of(row: Declared) -> list[str]:
    """Values to ask a row about: its own, and words and numbers that nobody thought of."""
    return list(dict.fromkeys((row.default, *row.choices, "1", "0.5", "some/path"))) if row.kind == "value" else [""]


def differing(table: str, framework: str) -> dict[str, str]:
    """Arguments whose default, put into our words, is another than that of the flag it is here."""
    found = {}
    for row in declared(table):
        if row.kind != "value" or not row.default or row.default in ("[]", "?"):
            continue
        (item,) = translate(row.words(row.default), framework)
        words = [] if item.ours.startswith("megapar") else shlex.split(item.ours)
        for place, word in enumerate(words):
            here = spellings()[normal(word[2:])].flag if word.startswith("--") else None
            usual = here.defaults.get("moe") if here is not None else None
            if here is not None and here.takes_value and convert(here, words[place + 1]) != usual:
                found[normal(row.name)] = f"{row.default} there, {usual} here"
    return found
