"""One row of the compatibility matrix, and the facts it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

REFUSE = "refuse"
DOWNGRADE = "downgrade"
ADVICE = "advice"
LIFTED = "lifted"
NOT_BUILT = "not-built"
SETTLED = "settled"

MODELS = ("moe", "ernie")

# Where rows are from that others have published, beside the topics of docs/.
PADDLE_SHARDING = "PaddlePaddle PR 31884"
PADDLE_RECOMPUTE = "PaddlePaddle's recompute for pipelines"
MINDSPEED_AMPIPE = "MindSpeed's AMPipe document"
DOCUMENTS = (PADDLE_SHARDING, PADDLE_RECOMPUTE, MINDSPEED_AMPIPE)
NO_EFFECT = "no effect"  # against flags that would change nothing

# What a row may read besides flags; everything else is a flag's field name.
FACTS = (
    *("kind", "sharding_asked", "dp_asked", "data_ranks", "changed", "asked", "given"),
    *("launched_size", "export_class"),
)
_SILENT = ("kind", "changed", "asked", "given")


class Facts:
    """Read-only values by attribute, only those that a row declares; another name raises AttributeError.

    Beside the flags: ``kind`` (moe or ernie), ``data_ranks``, ``launched_size`` (the WORLD_SIZE of the environment, or
    1), ``sharding_asked`` and ``dp_asked`` (-1 before they are resolved), ``changed`` (names whose asked value is not
    the default), ``asked`` (values before any was derived), ``given`` (names that the line or a file sets) and
    ``export_class`` (what --save-hf writes).
    """

    def __init__(self, values: Mapping[str, Any], reads: Iterable[str]) -> None:
        self._values = {name: values[name] for name in reads}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"the rule reads {name} without declaring it") from None


Test = Callable[[Facts], bool]


def always(facts: Facts) -> bool:
    """The condition of a row that always applies."""
    return True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row: where ``when`` holds, ``requires`` must hold.

    id: stable name. reads: the facts it looks at; a row with one missing (a bad value) is not evaluated. message: the
    requirement in words; the values are put behind it. fix: what to do, with the nearest legal values. source: where
    the row comes from. passing, failing: flags of an example of each, for the first of ``models``. kind: refuse;
    downgrade (a warning, then ``sets`` is applied); advice (a warning, and nothing changes); lifted (only under
    --strict-seed-rules, ``reason`` says why); not-built (a feature of a later version); settled (an automatic
    choice has one outcome, for the reason in ``message``). models: the trainers it is for.
    """

    id: str
    reads: tuple[str, ...]
    message: str
    source: str
    passing: str
    failing: str
    requires: Test
    when: Test = always
    fix: str | Callable[[Facts], str] = ""
    kind: str = REFUSE
    sets: tuple[tuple[str, Any], ...] = ()
    reason: str = ""
    models: tuple[str, ...] = MODELS

    def broken(self, values: Mapping[str, Any]) -> bool:
        """The row applies to these values and is not kept. False where a value it reads is missing."""
        if values.get("kind") not in self.models or any(name not in values for name in self.reads):
            return False
        facts = Facts(values, self.reads)
        return self.when(facts) and not self.requires(facts)

    def text(self, values: Mapping[str, Any]) -> str:
        """The requirement with the values that break it."""
        shown = ", ".join(f"{spell(name)} {show(values[name])}" for name in self.reads if name not in _SILENT)
        changes = [f"{spell(name)} is {show(value)}" for name, value in self.sets if values.get(name) != value]
        said = f"{' and '.join(changes)}: {self.message}" if changes else self.message
        return f"{said} ({shown})." if shown else f"{said}."

    def advice(self, values: Mapping[str, Any]) -> str:
        """What to do about these values."""
        return self.fix if isinstance(self.fix, str) else self.fix(Facts(values, self.reads))


def spell(name: str) -> str:
    """A fact as a person reads it: a flag with its hyphens, anything else in words."""
    words = {
        "dp_degree": "dp",
        "sharding_asked": "--sharding-degree",
        "dp_asked": "--dp-degree",
        "data_ranks": "data ranks",
        "launched_size": "WORLD_SIZE",
        "export_class": "as",
    }
    return words.get(name) or "--" + name.replace("_", "-").replace("broadcast-mb", "broadcast-MB")


def show(value: Any) -> str:
    """A value as it would be written behind its flag."""
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number above 0 in rising order."""
    assert number > 0
    small = [low for low in range(1, int(number**0.5) + 1) if number % low == 0]
    return tuple(sorted({*small, *(number // low for low in small)}))


def near_divisors(number: int, wanted: int, count: int = 4) -> str:
    """The divisors of ``number`` nearest to ``wanted``, for a sentence: ``2, 4 or 8``."""
    nearest = sorted(divisors(number), key=lambda value: (abs(value - wanted), value))[:count]
    return either(sorted(nearest))


def near_multiples(step: int, wanted: int) -> str:
    """The multiples of ``step`` around ``wanted``, at least one step."""
    low = max(step, wanted // step * step)
    return either([low] if low == wanted else sorted({low, (wanted // step + 1) * step}))


def either(values: Iterable[Any]) -> str:
    """``1, 2 or 4``."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else "none"
