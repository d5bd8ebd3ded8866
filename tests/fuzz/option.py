"""A row of the fuzzer's table: a flag, its values that are legal beside what was drawn before, and when it applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from megapar.arguments import FLAGS

Condition = Callable[["Drawn"], bool]


class Drawn(dict[str, Any]):
    """What was drawn so far, by flag; as an attribute, a flag that was left out has its default."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return FLAGS[name].defaults[self["kind"]] if value is None and name in FLAGS else value


def always(drawn: Drawn) -> bool:
    """The condition of an option that always applies."""
    return True


@dataclass(frozen=True)
class Option:
    """One flag of the table. Values are drawn in the table's order, so that a row may look at the rows above it.

    name: field name of the flag. values: the legal ones, simplest first (minimising moves towards it); None leaves the
    flag out. when: where the flag means something; elsewhere it is left out. wild: values that a case may get without
    being asked whether they are legal, so that refusals are exercised. layout: the reference of one process does not
    get it. size: has too many values to count pairs of. rare: too slow to have all its pairs run, so that they are not
    counted either. group: what a value counts as in pairs.
    """

    name: str
    values: Sequence[Any] | Callable[[Drawn], Sequence[Any]] = (None,)
    _: KW_ONLY
    when: Condition = always
    wild: tuple[Any, ...] = ()
    layout: bool = False
    size: bool = False
    rare: bool = False
    group: Callable[[Any], str] = str

    @property
    def kinds(self) -> tuple[str, ...]:
        """The models that have the flag."""
        return FLAGS[self.name].models

    def legal(self, drawn: Drawn) -> list[Any]:
        """The values that are legal together with what was drawn; never empty."""
        if not self.when(drawn):
            return [None]
        values = self.values(drawn) if callable(self.values) else self.values
        return list(values) or [None]

    @property
    def counted(self) -> bool:
        """Whether pairs with its values are counted."""
        return not self.size and not self.rare and self.values != (None,)


def of_layout(*options: Option) -> tuple[Option, ...]:
    """The options, marked as options of the layout."""
    return tuple(replace(option, layout=True) for option in options)


def degree(value: Any) -> str:
    """What a number of ranks, stages or slices counts as in pairs: 1, 2, odd, or even and at least 4."""
    number = int(value)
    return str(number) if number <= 2 else "odd" if number % 2 else "4 or more"


def some(value: Any) -> str:
    """What a value counts as in pairs if a flag has too many of them: only as given."""
    return "some"


def spell(name: str, value: Any) -> list[str]:
    """The flag as it stands on a command line; nothing for None."""
    spelling = FLAGS[name].spelling
    if value is None:
        return []
    if FLAGS[name].takes_value:
        if isinstance(value, tuple):
            return [spelling, ",".join(value)] if FLAGS[name].comma else [spelling, *map(str, value)]
        return [spelling, str(value)]
    return [spelling] if value in (True, "on") else [spelling.replace("--", "--no-", 1)]


def spell_all(settings: Mapping[str, Any]) -> list[str]:
    """All flags on one line."""
    return [token for name, value in settings.items() for token in spell(name, value)]
