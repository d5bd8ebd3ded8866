"""A flag as the metadata of a dataclass field: help, unit, choices, bounds, spellings, defaults per model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import Any

KINDS = ("moe", "ernie")
SCRIPTS = {"moe": "pretrain_moe.py", "ernie": "pretrain_ernie.py"}

SWITCH = ("auto", "on", "off")


def normal(name: str) -> str:
    """Hyphens or underscores, any case: one name."""
    return name.lower().replace("_", "-")


@dataclass(frozen=True)
class Alias:
    """Another spelling of a flag.

    name: as written after ``--``. value: what the bare spelling means (``--bf16``); None where it takes the flag's own
    value. note: printed as a warning where the spelling is used.
    """

    name: str
    value: Any = None
    note: str = ""


@dataclass(frozen=True)
class Flag:
    """One flag. ``name`` is the field's name; ``defaults`` holds one value per model kind, None where it is derived.

    type: one of int, float, str, bool, switch (auto, on, off), strings, integers. low, high: inclusive bounds.
    above: an exclusive lower bound. words: names of special numbers, such as ``auto`` for 0. count: how many values a
    list has (0: any). comma: a list is written with commas. models: the model kinds that know the flag. meta: says
    how to run, not what: kept out of YAML files. path: names files or folders, in which ~ and $NAME are expanded; nodes
    of a run agree in whether it is given, not in the name. each: takes one value, and repeated ones add up. per_node:
    nodes of a run may differ in it. derived: how a value of None is replaced, for people.
    """

    name: str
    group: str
    type: str
    defaults: Mapping[str, Any]
    help: str
    unit: str = ""
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    words: Mapping[str, int] = field(default_factory=dict)
    aliases: tuple[Alias, ...] = ()
    count: int = 0
    comma: bool = False
    models: tuple[str, ...] = KINDS
    meta: bool = False
    path: bool = False
    each: bool = False
    per_node: bool = False
    derived: str = ""
    primary: str = ""

    @property
    def spelling(self) -> str:
        """The flag as it is written first."""
        return "--" + (self.primary or self.name.replace("_", "-"))

    @property
    def takes_value(self) -> bool:
        """The flag is followed by a value (a switch may be)."""
        return self.type not in ("bool", "switch")

    @property
    def takes_list(self) -> bool:
        """The flag is followed by any number of values."""
        return self.type in ("strings", "integers") and not self.each


def flag(
    default: Any,
    help: str,
    *,
    ernie: Any = ...,
    aliases: tuple[str | Alias, ...] = (),
    **extra: Any,
) -> Any:
    """A dataclass field that is a flag. ``ernie``: the default of pretrain_ernie.py where it is another one."""
    defaults = {"moe": default, "ernie": default if ernie is ... else ernie}
    spelled = tuple(Alias(alias) if isinstance(alias, str) else alias for alias in aliases)
    return field(metadata={"flag": {"defaults": defaults, "help": help, "aliases": spelled, **extra}})


def fact(help: str) -> Any:
    """A dataclass field that follows from the flags and cannot be set."""
    return field(metadata={"fact": help})


TYPES = {
    "int": "int",
    "float": "float",
    "str": "str",
    "bool": "bool",
    "tuple[str, ...]": "strings",
    "tuple[int, ...]": "integers",
}


def to_flag(item: Field[Any], group: str) -> Flag | None:
    """The Flag that a dataclass field describes; None for a fact."""
    described = item.metadata.get("flag")
    if described is None:
        return None
    options = dict(described)
    kind = options.pop("type", None) or TYPES[str(item.type).replace(" | None", "")]
    return Flag(name=item.name, group=group, type=kind, **options)
