"""Flags, declared in the metadata of dataclass fields: help, unit, choices, bounds, spellings, defaults per model.

A number is declared once: the field of the dataclass that layers take carries its flag. ``from_flags`` builds such a
dataclass from the values of flags, and ``to_flags`` is its inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, TypeVar, cast

from megapar.schema.role import Role

T = TypeVar("T")

KINDS = ("moe", "ernie")
MOE, ERNIE = ("moe",), ("ernie",)
"""``models`` of the flags and rules of one kind alone."""
SCRIPTS = {"moe": "pretrain_moe.py", "ernie": "pretrain_ernie.py"}

SWITCH = ("auto", "on", "off")


def normal(name: str) -> str:
    """Return a name in lower case with hyphens, so that all spellings of it compare equal."""
    return name.lower().replace("_", "-")


@dataclass(frozen=True)
class Alias:
    """Alternative spelling of a flag.

    Attributes:
        name: The spelling, without ``--``.
        value: Value that the bare spelling sets (as ``--bf16``); None if it takes a value like the flag itself.
        note: Warning to print when the spelling is used.
    """

    name: str
    value: Any = None
    note: str = ""


@dataclass(frozen=True)
class Flag:
    """One flag of the command line and of YAML files.

    Attributes:
        group: Name of the group that lists it.
        type: int, float, str, bool, switch (auto, on, off), strings or integers.
        defaults: Default per model kind; None if the value is derived.
        role: What a search for a faster layout does with it; by default that of its dataclass.
        choices: Legal values, if they are listed; SWITCH by default for a switch.
        low: Inclusive lower bound.
        high: Inclusive upper bound.
        above: Exclusive lower bound.
        words: Names of special numbers, such as ``auto`` for 0.
        aliases: Alternative spellings.
        count: Number of values in a list; 0: any.
        comma: A list is written with commas.
        models: Model kinds that have the flag.
        meta: Controls how to run, not what to run, and is not allowed in YAML files.
        path: Names files or folders, in which ~ and $NAME are expanded. The nodes of a run must agree whether it is
            given, but may give different names.
        store: Its paths may also be URIs of object stores.
        each: Takes one value, and may be repeated to add more.
        per_node: May differ between the nodes of a run.
        derived: Description of the value that replaces None.
        primary: First spelling, if it differs from the name.
        after: Flag that precedes it in --help and docs/flags.md; "": the one before it in its dataclass.
        undrawn: Why the layout fuzzer of the tests does not draw it, if its role does not say so.
        other: Least other legal value, for tests, if its type does not say so (``tests/flags/table.py``).
        named: Its paths may have names, NAME=PATH.
        form: Returns the text that a value of another form stands for, such as a list of mappings in YAML. Raises
            ValueError for a text or value that is not of its form.
    """

    name: str
    group: str
    type: str
    defaults: Mapping[str, Any]
    help: str
    role: Role
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
    store: bool = False
    each: bool = False
    per_node: bool = False
    derived: str = ""
    primary: str = ""
    after: str = ""
    undrawn: str = ""
    other: Any = None
    named: bool = False
    form: Callable[[Any], str] | None = None

    @property
    def spelling(self) -> str:
        """Primary spelling, with its hyphens."""
        return "--" + (self.primary or self.name.replace("_", "-"))

    @property
    def negation(self) -> str:
        """Spelling that sets a switch to False, with its hyphens."""
        name = self.spelling[2:]
        return f"--{name[3:]}" if name.startswith("no-") else f"--no-{name}"

    @property
    def takes_value(self) -> bool:
        """True if the flag must be followed by a value; for a switch the value is optional."""
        return self.type not in ("bool", "switch")

    @property
    def takes_list(self) -> bool:
        """True if the flag may be followed by several values."""
        return self.type in ("strings", "integers") and not self.each


def flag(
    default: Any,
    help: str,
    *,
    ernie: Any = ...,
    aliases: tuple[str | Alias, ...] = (),
    value: Any = ...,
    through: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = None,
    **extra: Any,
) -> Any:
    """Declare a dataclass field that is a flag.

    Args:
        default: Default of the flag; None if it is derived.
        ernie: Default in pretrain_ernie.py, if it differs.
        aliases: Alternative spellings.
        value: Default of the field when the dataclass is built without flags, if not the flag's; MISSING: the field is
            required, as it is if the flag's default is derived.
        through: Functions from the flag's value to the field's and back, if they differ.
        extra: Other attributes of ``Flag``: ``name`` if it differs from the field's, ``group`` if the flag is listed in
            a different group than the other flags of the dataclass.
    """
    defaults = {"moe": default, "ernie": default if ernie is ... else ernie}
    spelled = tuple(Alias(alias) if isinstance(alias, str) else alias for alias in aliases)
    choices = {"choices": SWITCH} if extra.get("type") == "switch" else {}
    described = {"defaults": defaults, "help": help, "aliases": spelled, **choices, **extra}
    if value is ...:
        value = MISSING if default is None else default
    return field(default=value, metadata={"flag": described, "through": through})


def follows(source: Callable[[Mapping[str, Any]], Any], *, value: Any = MISSING) -> Any:
    """Declare a dataclass field without a flag, computed from the values of flags by name. ``value``: its default."""
    return field(default=value, metadata={"follows": source})


def fact(help: str) -> Any:
    """Declare a dataclass field that is derived from the flags and cannot be set."""
    return field(metadata={"fact": help})


TYPES = {
    "int": "int",
    "float": "float",
    "str": "str",
    "bool": "bool",
    "tuple[str, ...]": "strings",
    "tuple[int, ...]": "integers",
}


def to_flag(item: Field[Any], group: str, models: tuple[str, ...], role: Role) -> Flag | None:
    """Return the Flag that a field of a dataclass with this group and role declares, or None if it declares none."""
    described = item.metadata.get("flag")
    if described is None:
        return None
    options = {"name": item.name, "group": group, "models": models, "role": role, **described}
    kind = options.pop("type", None) or TYPES[str(item.type).replace(" | None", "")]
    return Flag(type=kind, **options)


def from_flags(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass ``cls`` from flat values by flag name; fields without a flag keep their defaults."""
    arguments = {}
    for name, metadata in _declared(cast(Any, cls)):
        if "follows" in metadata:
            arguments[name] = metadata["follows"](values)
        elif "fact" in metadata:
            arguments[name] = values[name]
        elif "flag" in metadata:
            value = values[metadata["flag"].get("name", name)]
            arguments[name] = metadata["through"][0](value) if metadata["through"] else value
    return cls(**arguments)


def to_flags(instance: Any) -> dict[str, Any]:
    """Return the values of a dataclass's flags by flag name; the inverse of ``from_flags``."""
    values = {}
    for name, metadata in _declared(cast(Any, type(instance))):
        if "flag" in metadata:
            value = getattr(instance, name)
            values[metadata["flag"].get("name", name)] = metadata["through"][1](value) if metadata["through"] else value
    return values


def spellings_of(cls: type[Any]) -> dict[str, str]:
    """Return the spelling of the flag of each field that has one."""
    flags = {name: metadata["flag"] for name, metadata in _declared(cast(Any, cls)) if "flag" in metadata}
    named = {name: flag.get("primary") or flag.get("name", name) for name, flag in flags.items()}
    return {name: f"--{text.replace('_', '-')}" for name, text in named.items()}


@cache
def _declared(cls: type[Any]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Return (name, metadata) of each field; a subclass that changes the default of a field keeps its declaration."""
    families = [base.__dict__["__dataclass_fields__"] for base in cls.__mro__ if "__dataclass_fields__" in vars(base)]
    found: list[tuple[str, Mapping[str, Any]]] = []
    for item in fields(cls):
        every = (known[item.name].metadata for known in families if item.name in known)
        found.append((item.name, next((metadata for metadata in every if metadata), {})))
    return tuple(found)
