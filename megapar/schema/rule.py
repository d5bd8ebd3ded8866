"""Rows of the compatibility matrix, and the facts that they read."""

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

# Published sources of rows; other rows name a topic of docs/.
PADDLE_SHARDING = "PaddlePaddle PR 31884"
PADDLE_RECOMPUTE = "PaddlePaddle's recompute for pipelines"
MINDSPEED_AMPIPE = "MindSpeed's AMPipe document"
DOCUMENTS = (PADDLE_SHARDING, PADDLE_RECOMPUTE, MINDSPEED_AMPIPE)
NO_EFFECT = "no effect"  # source of the rows that refuse flags without an effect

# Values that a row may read in addition to flags; any other name is a flag's field name.
FACTS = (
    "kind", "sharding_requested", "dp_requested", "data_ranks", "not_default", "requested", "given",
    "launched_size", "export_class", "remote_paths",
)  # fmt: skip
_SILENT = ("kind", "not_default", "requested", "given", "train_epochs")


class Facts:
    """Read-only values by attribute, restricted to those that a row declares; any other name raises AttributeError.

    In addition to the flags: ``kind`` (moe or ernie), ``data_ranks``, ``launched_size`` (WORLD_SIZE of the environment,
    or 1), ``sharding_requested`` and ``dp_requested`` (the degrees as given, -1 if they are derived), ``requested``
    (values before any is derived), ``not_default`` (names whose requested value is not the default), ``given`` (names
    that the command line or a file sets), ``export_class`` (the class that --save-hf writes) and ``remote_paths``
    (flags whose path is a URL, each with it).
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
    """Return True: the condition of a row that always applies."""
    return True


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Row of the matrix: if ``when`` is true, ``requires`` must be true.

    Attributes:
        id: Stable name.
        reads: Names of the facts that it reads. The row is skipped if one is missing because of a bad value.
        message: The requirement in words; the values are appended.
        source: Origin of the row.
        passing: Flags of an example that satisfies the row, for the first of ``models``.
        failing: Flags of an example that violates it.
        requires: The requirement.
        when: The condition under which the row applies.
        fix: The action to take, with the nearest legal values.
        kind: Refuse; downgrade (warn and apply ``sets``); advice (warn only); lifted (applies only with
            --strict-seed-rules, for ``reason``); not-built (a feature of a later version); settled (an automatic choice
            has only one outcome, explained by ``message``).
        sets: Values that a downgrade applies.
        reason: Reason why a restriction is lifted.
        models: Trainers that the row applies to.
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
        """Return True if the row applies to these values and is violated; False if a value that it reads is missing."""
        if values.get("kind") not in self.models or any(name not in values for name in self.reads):
            return False
        facts = Facts(values, self.reads)
        return self.when(facts) and not self.requires(facts)

    def text(self, values: Mapping[str, Any]) -> str:
        """Return the requirement with the values that violate it."""
        shown = ", ".join(f"{spell(name)} {show(values[name])}" for name in self.reads if name not in _SILENT)
        changes = [f"{spell(name)} is {show(value)}" for name, value in self.sets if values.get(name) != value]
        message = f"{' and '.join(changes)}: {self.message}" if changes else self.message
        return f"{message} ({shown})." if shown else f"{message}."

    def advice(self, values: Mapping[str, Any]) -> str:
        """Return the fix for these values."""
        return self.fix if isinstance(self.fix, str) else self.fix(Facts(values, self.reads))


def unused(id: str, names: tuple[str, ...], reads: tuple[str, ...], when: Test, what: str, **more: Any) -> Rule:
    """Build a row that refuses flags without effect. ``what`` says when that is, as in "with --pp-degree 1".

    ``reads`` are the facts of ``when``, in front of ``not_default``. The default fix is to leave the flags out.
    """
    *others, last = map(spell, names)
    subject = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    leave_out = {"fix": lambda f: f"Leave out {either(spell(n) for n in names if n in f.not_default)}."}
    return Rule(
        id=id,
        reads=(*reads, "not_default"),
        when=when,
        requires=lambda f: not f.not_default & set(names),
        message=f"{subject} no effect {what}",
        source=NO_EFFECT,
        **{**leave_out, **more},
    )


def spell(name: str) -> str:
    """Return the name of a fact for messages: a flag with its hyphens, anything else in words."""
    words = {
        "dp_degree": "dp",
        "sharding_requested": "--sharding-degree",
        "dp_requested": "--dp-degree",
        "data_ranks": "data ranks",
        "launched_size": "WORLD_SIZE",
        "export_class": "as",
        "remote_paths": "here",
    }
    return words.get(name) or "--" + name.replace("_", "-").replace("broadcast-mb", "broadcast-MB")


def show(value: Any) -> str:
    """Return a value as it is written after its flag."""
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number above 0 in ascending order."""
    assert number > 0
    small = [low for low in range(1, int(number**0.5) + 1) if number % low == 0]
    return tuple(sorted({*small, *(number // low for low in small)}))


def near_divisors(number: int, wanted: int, count: int = 4) -> str:
    """Return the divisors of ``number`` nearest to ``wanted`` for a sentence, as in ``2, 4 or 8``."""
    nearest = sorted(divisors(number), key=lambda value: (abs(value - wanted), value))[:count]
    return either(sorted(nearest))


def near_multiples(step: int, wanted: int) -> str:
    """Return the multiples of ``step`` around ``wanted``, but not 0, for a sentence."""
    low = max(step, wanted // step * step)
    return either([low] if low == wanted else sorted({low, (wanted // step + 1) * step}))


def either(values: Iterable[Any]) -> str:
    """Join values for a sentence, as in ``1, 2 or 4``."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else "none"
