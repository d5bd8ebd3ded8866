"""A case of the fuzzer: a model, a layout and options, and how they are drawn from the table."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hypothesis import strategies as st

from megapar.arguments import FLAGS, SCRIPTS, resolved_values
from tests.fuzz.option import Drawn, Option, degree, spell_all
from tests.fuzz.table import FIXED, FP16, OPTIONS, STILL, WORLD_SIZES

GLOO, LATE, LAZY = "gloo", "late", "lazy"
BACKENDS = (GLOO, GLOO, LAZY, LATE)  # as often as each stands here
Atom = tuple[str, str]
Pair = tuple[Atom, Atom]
KINDS_DRAWN = ("moe", "moe", "ernie")
EMPTY: Mapping[str, Sequence[Any]] = {}
FP16_NAMES = {row.name for row in FP16}


@dataclass(frozen=True)
class Case:
    """What one example runs.

    settings: (flag's name, value) of every row of the table that was given. wild: the rows that were drawn without
    being asked whether they are legal; without any the case must not be refused. backend: gloo, or late, which shows
    what reads or reuses a buffer in flight, or lazy, which is that on a device with streams.
    """

    kind: str
    world_size: int
    settings: tuple[tuple[str, Any], ...]
    wild: tuple[str, ...] = ()
    backend: str = GLOO

    @property
    def exact(self) -> bool:
        """In fp64, whose numbers are those of one process to the last digits."""
        return dict(self.settings).get("dtype", "fp64") == "fp64"

    def flags(self) -> list[str]:
        """The run on the layout."""
        return spell_all({**self._fixed(), **dict(self.settings)})

    def reference_flags(
        self, global_batch_size: int, rows: Sequence[Option] = OPTIONS, dtype: str | None = None
    ) -> list[str]:
        """The run on one process; what the layout derived its batch from, one process is told.

        dtype: in place of the case's own; what belongs to the case's alone is left out.
        """
        layout = {row.name for row in rows if row.layout}
        settings = {name: value for name, value in self.settings if name not in layout}
        if dtype is not None:
            settings = {name: value for name, value in settings.items() if name not in FP16_NAMES} | {"dtype": dtype}
        return spell_all({**self._fixed(), **settings, "global_batch_size": global_batch_size})

    def _fixed(self) -> dict[str, object]:
        return FIXED if self.exact else FIXED | STILL

    def command(self) -> str:
        """The layout's run as a line for a terminal."""
        launch = "python" if self.world_size == 1 else f"torchrun --nproc-per-node {self.world_size}"
        return f"{launch} {SCRIPTS[self.kind]} {shlex.join(self.flags())}"

    def again(self) -> str:
        """How to run this case alone."""
        flags = shlex.join(spell_all(dict(self.settings)))
        return f"scripts/fuzz_layouts.sh --backend {self.backend} --case {self.kind} {self.world_size} {flags}"

    def pairs(self, rows: Sequence[Option] = OPTIONS) -> set[Pair]:
        """Every two options with the values they have here, left-out ones too; sizes are not counted."""
        given = dict(self.settings)
        atoms = [atom_of(row, given.get(row.name)) for row in rows if row.counted and self.kind in row.kinds]
        values = [("kind", self.kind), ("world_size", degree(self.world_size)), *atoms]
        return set(combinations(sorted(values), 2))


def atom_of(row: Option, value: Any) -> Atom:
    """What a row's value counts as in pairs."""
    return row.name, "default" if value is None else row.group(value)


def case_of(kind: str, world_size: int, line: str | Sequence[str], backend: str = GLOO) -> Case:
    """The case of a command line's flags; every option of it counts as wild."""
    tokens = shlex.split(line) if isinstance(line, str) else list(line)
    requested: Mapping[str, Any] = resolved_values(kind, tokens, {"WORLD_SIZE": str(world_size)})["requested"]
    given = tuple((n, v) for n, v in requested.items() if v != FLAGS[n].defaults[kind] and FIXED.get(n) != v)
    return Case(kind, world_size, given, tuple(name for name, _ in given), backend)


# How one value of a row is chosen from the legal ones, beside what was drawn before.
Choose = Callable[[str, Sequence[Any], Drawn], Any]


def draw_case(kind: str, world_size: int, choose: Choose, forced: Mapping[str, Sequence[Any]] = EMPTY) -> Drawn:
    """The values of all rows of the table from the top, each legal beside those above it, or one of the forced ones."""
    drawn = Drawn(kind=kind, world_size=world_size)
    for row in OPTIONS:
        if kind in row.kinds:
            values = forced.get(row.name) or row.legal(drawn)
            drawn[row.name] = values[0] if len(values) == 1 else choose(row.name, values, drawn)
    return drawn


def case_from(drawn: Drawn, wild: tuple[str, ...] = (), backend: str = GLOO) -> Case:
    """The case of what was drawn. backend: if it can."""
    given = tuple((row.name, drawn[row.name]) for row in OPTIONS if drawn.get(row.name) is not None)
    can = drawn.world_size > 1 and drawn.sharding_stage < 3
    return Case(drawn["kind"], drawn.world_size, given, wild, backend if can else GLOO)


@st.composite
def cases(draw: st.DrawFn, *, rare: bool = True) -> Case:
    """Cases of the table: most of them legal by construction, some with one or two options thrown in anyhow.

    rare: with options that take minutes, now and then.
    """
    kind = draw(st.sampled_from(KINDS_DRAWN))
    world_size = draw(st.sampled_from(WORLD_SIZES))
    wild = draw(_wild([row.name for row in OPTIONS if kind in row.kinds and row.wild]))
    forced = {row.name: row.wild for row in OPTIONS if row.name in wild}
    slow = set() if rare else {row.name for row in OPTIONS if row.rare}

    def choose(name: str, values: Sequence[Any], drawn: Drawn) -> Any:
        chosen = draw(st.sampled_from(values))  # drawn all the same, so that a seed gives the same cases but for this
        return values[0] if name in slow else chosen

    drawn = draw_case(kind, world_size, choose, forced)
    return case_from(drawn, wild, BACKENDS[draw(st.integers(0, 3))])


@st.composite
def _wild(draw: st.DrawFn, names: list[str]) -> tuple[str, ...]:
    number = draw(st.sampled_from((*(0,) * 7, 1, 1, 2)))
    return tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=number, max_size=number))))
