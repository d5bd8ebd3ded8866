"""A case of the fuzzer: a model, a layout and options, and how they are drawn from the table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hypothesis import strategies as st

from megapar.arguments import FLAGS, SCRIPTS, resolved_values
from tests.fuzz.option import Drawn, Option, spell_all
from tests.fuzz.table import FIXED, OPTIONS, WORLD_SIZES

GLOO, LATE = "gloo", "late"
Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Case:
    """What one example runs.

    settings: (flag's name, value) of every row of the table that was given. wild: the rows that were drawn without
    being asked whether they are legal; without any the case must not be refused. backend: gloo, or late, which shows
    what reads or reuses a buffer in flight.
    """

    kind: str
    world_size: int
    settings: tuple[tuple[str, Any], ...]
    wild: tuple[str, ...] = ()
    backend: str = GLOO

    def flags(self) -> list[str]:
        """The run on the layout."""
        return spell_all({**FIXED, **dict(self.settings)})

    def reference_flags(self, global_batch_size: int, rows: Sequence[Option] = OPTIONS) -> list[str]:
        """The run on one process; what the layout derived its batch from, one process is told."""
        layout = {row.name for row in rows if row.layout}
        settings = {name: value for name, value in self.settings if name not in layout}
        return spell_all({**FIXED, **settings, "global_batch_size": global_batch_size})

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
        counted = [row.name for row in rows if not row.size and self.kind in row.kinds and row.values != (None,)]
        values = [("kind", self.kind), ("world_size", str(self.world_size))]
        values += [(name, str(given.get(name, "default"))) for name in counted]
        return set(combinations(sorted(values), 2))


def case_of(kind: str, world_size: int, line: str | Sequence[str], backend: str = GLOO) -> Case:
    """The case of a command line's flags; every option of it counts as wild."""
    tokens = shlex.split(line) if isinstance(line, str) else list(line)
    asked: Mapping[str, Any] = resolved_values(kind, tokens, {"WORLD_SIZE": str(world_size)})["asked"]
    given = tuple((n, v) for n, v in asked.items() if v != FLAGS[n].defaults[kind] and FIXED.get(n) != v)
    return Case(kind, world_size, given, tuple(name for name, _ in given), backend)


@st.composite
def cases(draw: st.DrawFn, rows: Sequence[Option] = OPTIONS) -> Case:
    """Cases of the table: most of them legal by construction, some with one or two options thrown in anyhow."""
    kind = draw(st.sampled_from(("moe", "moe", "ernie")))
    mine = [row for row in rows if kind in row.kinds]
    drawn = Drawn(kind=kind, world_size=draw(st.sampled_from(WORLD_SIZES)))
    wild = draw(_wild([row.name for row in mine if row.wild]))
    for row in mine:
        values = row.wild if row.name in wild else row.legal(drawn)
        drawn[row.name] = values[0] if len(values) == 1 else draw(st.sampled_from(values))
    given = tuple((row.name, drawn[row.name]) for row in mine if drawn[row.name] is not None)
    late = drawn.world_size > 1 and drawn.sharding_stage < 3 and draw(st.integers(0, 3)) == 3
    return Case(kind, drawn.world_size, given, wild, LATE if late else GLOO)


@st.composite
def _wild(draw: st.DrawFn, names: list[str]) -> tuple[str, ...]:
    number = draw(st.sampled_from((*(0,) * 7, 1, 1, 2)))
    return tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=number, max_size=number))))
