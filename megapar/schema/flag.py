"""A flag as the metadata of a dataclass field: help, unit, choices, bounds, spellings, defaults per model.

A number is declared once: the field of the dataclass that layers take carries its flag. ``from_flags`` builds such a
dataclass from the values of flags, and ``to_flags`` gives them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")

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
    nodes of a run may differ in it. derived: how a value of None is replaced, for people. after: the flag that it
    follows in --help and in docs/flags.md; "": the one before it in its dataclass.
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
    after: str = ""

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
    value: Any = MISSING,
    through: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None,
    **extra: Any,
) -> Any:
    """A dataclass field that is a flag.

    default: of the command line; a None is derived. ernie: the default of pretrain_ernie.py where it is another one.
    value: the field's default where the dataclass is made without flags; without it the field must be given. through:
    (flag's value to the field's, and back) where they differ. extra: attributes of ``Flag``; ``name`` where the flag's
    differs from the field's, ``group`` where it is listed elsewhere than the other flags of the dataclass.
    """
    defaults = {"moe": default, "ernie": default if ernie is ... else ernie}
    spelled = tuple(Alias(alias) if isinstance(alias, str) else alias for alias in aliases)
    described = {"defaults": defaults, "help": help, "aliases": spelled, **extra}
    return field(default=value, metadata={"flag": described, "through": through})


def follows(source: Callable[[Mapping[str, Any]], Any], *, value: Any = MISSING) -> Any:
    """A dataclass field without a flag, computed from the values of flags by name. value: as for ``flag``."""
    return field(default=value, metadata={"follows": source})


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


def to_flag(item: Field[Any], group: str, models: tuple[str, ...] = KINDS) -> Flag | None:
    """The Flag that a dataclass field describes; None for any other field."""
    described = item.metadata.get("flag")
    if described is None:
        return None
    options = {"name": item.name, "group": group, "models": models, **described}
    kind = options.pop("type", None) or TYPES[str(item.type).replace(" | None", "")]
    return Flag(type=kind, **options)


def from_flags(cls: type[T], values: Mapping[str, Any]) -> T:
    """The dataclass ``cls`` from flat values by flag name; fields that name no flag keep their defaults."""
    found = {}
    for name, metadata in _declared(cls):
        if "follows" in metadata:
            found[name] = metadata["follows"](values)
        elif "fact" in metadata:
            found[name] = values[name]
        elif "flag" in metadata:
            value = values[metadata["flag"].get("name", name)]
            found[name] = metadata["through"][0](value) if metadata["through"] else value
    return cls(**found)


def to_flags(made: Any) -> dict[str, Any]:
    """The values of the flags of a dataclass, by flag name: the inverse of ``from_flags``."""
    found = {}
    for name, metadata in _declared(type(made)):
        if "flag" in metadata:
            value = getattr(made, name)
            found[metadata["flag"].get("name", name)] = metadata["through"][1](value) if metadata["through"] else value
    return found


def _declared(cls: type[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, metadata) of each field; a subclass that gives a field another default keeps its declaration."""
    families = [base.__dict__["__dataclass_fields__"] for base in cls.__mro__ if "__dataclass_fields__" in vars(base)]
    for item in fields(cls):
        every = (known[item.name].metadata for known in families if item.name in known)
        yield item.name, next((metadata for metadata in every if metadata), {})
