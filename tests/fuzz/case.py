"""A case of the fuzzer: a model, a layout and options, and how they are drawn from the table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from hypothesis import strategies as st

from megapar.arguments import FLAGS, SCRIPTS, parse, resolved_values
from megapar.errors import ConfigError
from megapar.training.loop.outline import outline
from tests.equivalence.table import ON_STREAMS
from tests.fuzz.legal import split_dropout
from tests.fuzz.option import Drawn, Option, degree, spell_all
from tests.fuzz.table import FIXED, FP16, OPTIONS, STILL, WORLD_SIZES
from tests.support.forced import outcomes

STEPS = 2
ADAPTIVE_STEPS = 3  # two are measured
FOLDER = "FOLDER"
GLOO, LATE, LAZY, BOTH = "gloo", "late", "lazy", "late and lazy"
BACKENDS = (GLOO, GLOO, LAZY, LATE)  # as often as each stands here
THEN = "then"  # between the flags of a run and of the one that continues it
CONTINUED = 5  # one case in so many, if it can
IN_A_BUCKET = 3  # one case in so many of those that save checkpoints
UNCOMPILED = 6  # cases of one or two ranks for each that is compiled: 1 case of 20 in all
LAYOUTS_TRIED = 6  # for the run that continues
AGAIN = ("recompute_", "adaptive_recompute_")  # how options begin that change no bit
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
    what reads or reuses a buffer in flight, or lazy, which is that on a device with streams, or both of them, one after
    the other. continued: the same model on another layout, which loads a checkpoint of a step on the way. forced: the
    outcome of choices that a clock, memory or the device would make (tests/support/forced.py). bucket: checkpoints are
    in one of an object store, not in a folder.
    """

    kind: str
    world_size: int
    settings: tuple[tuple[str, Any], ...]
    wild: tuple[str, ...] = ()
    backend: str = GLOO
    continued: Case | None = None
    forced: tuple[tuple[str, Any], ...] = ()
    bucket: bool = False

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that it runs on."""
        return (LATE, LAZY) if self.backend == BOTH else (self.backend,)

    @property
    def hides(self) -> bool:
        """Whether an option hides something on a second stream."""
        return not {*self.flags()}.isdisjoint(ON_STREAMS)

    @property
    def exact(self) -> bool:
        """In fp64, whose numbers are those of one process to the last digits."""
        return dict(self.settings).get("dtype", "fp64") == "fp64"

    @property
    def by_bits(self) -> bool:
        """Whether its masks are those of its layout alone, on which it is compared with an uninterrupted run.

        That one does not recompute either; all bits are equal.
        """
        return split_dropout(Drawn(dict(self.settings), kind=self.kind, world_size=self.world_size))

    @property
    def steps(self) -> int:
        """Those that are run: all of a short run, or the first ones."""
        given = dict(self.settings)
        least = ADAPTIVE_STEPS if "adaptive_recompute_device_size" in given else STEPS
        return max(least, int(given.get("train_iters", 0)))

    @property
    def save_interval(self) -> int:
        """Steps between checkpoints; 0: there are none."""
        interval = int(dict(self.settings).get("save_interval", self.continued is not None))
        return min(interval, self.steps - 1) if self.continued else interval

    @property
    def resumed_at(self) -> int:
        """The step in the middle whose checkpoint the other run loads."""
        return self.save_interval * ((self.steps - 1) // self.save_interval // 2 or 1)

    def flags(self, folder: str = FOLDER) -> list[str]:
        """The run on the layout, with its checkpoints in the folder."""
        saved = {"save": folder, "save_interval": self.save_interval} if self.save_interval else {}
        return spell_all({**self.fixed(), **dict(self.settings), **saved})

    def uninterrupted(self) -> Case:
        """The same without checkpoints, and with nothing computed twice."""
        kept = [(name, value) for name, value in self.settings if not name.startswith((*AGAIN, "save_interval"))]
        return replace(self, settings=tuple(kept), backend=GLOO, continued=None, bucket=False)

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
        return spell_all({**self.fixed(), **settings, "global_batch_size": global_batch_size})

    def fixed(self) -> dict[str, object]:
        """Settings where a row does not say otherwise."""
        fixed = FIXED if self.exact or self.by_bits else FIXED | STILL
        if dict(self.settings).get("optimizer") == "sgd":  # has no epsilon
            return {name: value for name, value in fixed.items() if name != "adam_eps"}
        return fixed

    def command(self) -> str:
        """The layout's run as a line for a terminal, and the run that continues it."""
        launch = "python" if self.world_size == 1 else f"torchrun --nproc-per-node {self.world_size}"
        line = f"{launch} {SCRIPTS[self.kind]} {shlex.join(self.flags())}"
        if self.continued is None:
            return line
        return f"{line}\n{self.continued.command()} --load {FOLDER} --ckpt-step {self.resumed_at}"

    def again(self) -> str:
        """How to run this case alone."""
        runs = [self] if self.continued is None else [self, self.continued]
        lines = [shlex.join((str(run.world_size), *spell_all(dict(run.settings)))) for run in runs]
        forced = [dict(run.forced) for run in runs]
        before = f"--backend {shlex.quote(self.backend)}" + (f" --forced '{json.dumps(forced)}'" if any(forced) else "")
        before += " --bucket" if self.bucket else ""
        return f"scripts/fuzz_layouts.sh {before} --case {self.kind} {f' {THEN} '.join(lines)}"

    def without(self, name: str) -> Case:
        """The case with this option left out, of the run that continues it as well."""
        left = tuple(setting for setting in self.settings if setting[0] != name)
        continued = self.continued and self.continued.without(name)
        return replace(self, settings=left, wild=self.wild or ("left out",), continued=continued)

    def on(self, world_size: int) -> Case:
        """The case on so many ranks, which may be refused."""
        return replace(self, world_size=world_size, wild=self.wild or ("ranks",), continued=None)

    def scaled_by(self, loss_scale: float) -> Case:
        """The case with this first loss scale of fp16."""
        return replace(self, settings=tuple((dict(self.settings) | {"initial_loss_scale": loss_scale}).items()))

    def pairs(self, rows: Sequence[Option] = OPTIONS) -> set[Pair]:
        """Every two options with the values they have here, left-out ones too; sizes are not counted."""
        given = dict(self.settings)
        atoms = [atom_of(row, given.get(row.name)) for row in rows if row.counted and self.kind in row.kinds]
        values = [("kind", self.kind), ("world_size", degree(self.world_size)), *atoms]
        return set(combinations(sorted(values), 2))


def atom_of(row: Option, value: Any) -> Atom:
    """What a row's value counts as in pairs."""
    return row.name, "default" if value is None else row.group(value)


def case_of(
    kind: str,
    world_size: int,
    line: str | Sequence[str],
    backend: str = GLOO,
    forced: Sequence[Mapping[str, Any]] = (EMPTY, EMPTY),
) -> Case:
    """The case of a command line's flags; every option of it counts as wild.

    line: after ``THEN``, the number of ranks and the flags of the run that continues. forced: outcomes of both runs.
    """
    tokens = shlex.split(line) if isinstance(line, str) else list(line)
    if THEN in tokens:
        at = tokens.index(THEN)
        continued = case_of(kind, int(tokens[at + 1]), tokens[at + 2 :], backend, forced[1:])
        return replace(case_of(kind, world_size, tokens[:at], backend, forced), continued=continued)
    values = resolved_values(kind, tokens, {"WORLD_SIZE": str(world_size)})
    given = tuple(
        (name, value)
        for name, value in values["requested"].items()
        if name in values["given"] and value != FIXED.get(name, FLAGS[name].defaults[kind])
    )
    chosen = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in forced[0].items())
    return Case(kind, world_size, given, tuple(name for name, _ in given), backend, forced=chosen)


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
    """The case of what was drawn. backend: if it can; what hides something runs on both that show it."""
    given = tuple((row.name, drawn[row.name]) for row in OPTIONS if drawn.get(row.name) is not None)
    case = Case(drawn["kind"], drawn.world_size, given, wild)
    if drawn.world_size == 1 or drawn.sharding_stage == 3:
        return case
    return replace(case, backend=BOTH if case.hides else backend)


def continued(case: Case, choose: Choose) -> Case:
    """Return the case with a run on another layout that continues it, if the table has one.

    Capacities that are counted by rank or by slice differ between layouts by design, and other precisions than fp64
    are compared over steps that change nothing: such cases are returned as they are. A case that is compared by bits is
    continued on its own layout.
    """
    given = dict(case.settings)
    if case.by_bits:
        same_settings = tuple(setting for setting in case.settings if setting[0] != "save_interval")
        return replace(case, continued=replace(case, settings=same_settings))
    if case.wild or not case.exact or "moe_capacity_scope" in given or "ampipe_capacity" in given:
        return case
    try:
        batch = parse(case.kind, case.flags(), {"WORLD_SIZE": str(case.world_size)}).training.global_batch_size
    except ConfigError:
        return case  # legal by the table: a failure, which the case itself shows
    same = {row.name: (given.get(row.name),) for row in OPTIONS if not row.layout}
    same |= {"global_batch_size": (batch,), "gradient_merge_acc_step": (None,), "ampipe_capacity": (None,)}
    same["save_interval"] = (None,)
    for _ in range(LAYOUTS_TRIED):
        drawn = draw_case(case.kind, choose("world_size", WORLD_SIZES, Drawn()), choose, same)
        after = case_from(drawn)
        if _drawable(drawn) and _accepted(after):
            return replace(case, continued=after)
    return case


def with_outcomes(case: Case, choose: Choose) -> Case:
    """Return the case with an outcome of each choice that its flags leave to a clock, to memory or to the device.

    Compiling takes long, above all on many ranks. A run that is compared by bits is continued with the same outcomes.
    """
    try:
        config = parse(case.kind, case.flags(), {"WORLD_SIZE": str(case.world_size)})
    except ConfigError:
        return case
    offered = outcomes(config)
    if "compiled" in offered:
        offered["compiled"] = (*(None,) * UNCOMPILED, "on") if case.world_size <= 2 else (None,)
    names = {"compiled": "compile"}  # as the row that is as slow
    chosen = {name: choose(names.get(name, name), values, Drawn()) for name, values in offered.items()}
    forced = tuple((name, outcome) for name, outcome in chosen.items() if outcome is not None)
    then = case.continued
    if then is not None:
        then = replace(then, forced=forced) if case.by_bits else with_outcomes(then, choose)
    return replace(case, forced=forced, continued=then)


def _drawable(drawn: Drawn) -> bool:
    """Whether the table draws these values beside each other."""
    rows = [row for row in OPTIONS if drawn["kind"] in row.kinds and not row.layout and not row.size]
    return all(drawn[row.name] in row.legal(drawn) for row in rows)


def _accepted(case: Case) -> bool:
    try:
        outline(parse(case.kind, case.flags(), {"WORLD_SIZE": str(case.world_size)}))
    except ConfigError:
        return False
    return True


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

    case = case_from(draw_case(kind, world_size, choose, forced), wild, BACKENDS[draw(st.integers(0, 3))])
    continues = draw(st.integers(1, CONTINUED)) == CONTINUED
    case = with_outcomes(continued(case, choose) if continues or case.by_bits else case, choose)
    in_a_bucket = draw(st.integers(1, IN_A_BUCKET)) == IN_A_BUCKET
    return replace(case, bucket=in_a_bucket and case.save_interval > 0)


@st.composite
def _wild(draw: st.DrawFn, names: list[str]) -> tuple[str, ...]:
    number = draw(st.sampled_from((*(0,) * 7, 1, 1, 2)))
    return tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=number, max_size=number))))
