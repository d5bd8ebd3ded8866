"""The legal layouts nearest to one that was asked for, which the rules refuse or which other ranks shall run.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from megapar.arguments import Config, parse, resolved_values
from megapar.config.config import FLAGS
from megapar.errors import ConfigError
from megapar.schema.rule import divisors

# A change of how the model is cut moves memory and speed more than one of how many replicas there are.
_WEIGHTS = {"mp": 8.0, "pp": 8.0, "cp": 8.0, "ep": 4.0, "sharding": 2.0, "dp": 1.0}
FLAGGED = ("mp", "pp", "cp", "ep", "sharding")
MOST_TRIED = 5000

Degrees = Mapping[str, int]


@dataclass(frozen=True)
class Nearest:
    """flags: the run's, with the layout at their end. changes: for people, such as ``sharding 4 -> 2``."""

    flags: tuple[str, ...]
    changes: str


def nearest(kind: str, flags: Sequence[str], asked_ranks: int, ranks: int) -> Nearest | None:
    """The layout for ``ranks`` that keeps the global batch and is nearest to what the flags say for ``asked_ranks``.

    None where no layout is legal. Raises ConfigError where the flags are refused for ``asked_ranks`` themselves.
    """
    asked = parse(kind, flags, {"WORLD_SIZE": str(asked_ranks)})
    before = {axis: asked.grid.size(axis) for axis in _WEIGHTS}

    # Where a number of ranks is said, in a file or on the line, it is now another one.
    said = ("--world-size", str(ranks)) if asked.origins["world_size"] != "derived" else ()

    def line(degrees: Degrees) -> Sequence[str]:
        return (*flags, *_spelled(degrees, asked), *said)

    # Experts are spread over as many ranks as before or over a divisor of that.
    found = _layouts(ranks, {"ep": divisors(before["ep"])})
    for degrees in _legal(kind, ranks, before, line, found):
        changes = [f"{axis} {before[axis]} -> {degrees[axis]}" for axis in before if before[axis] != degrees[axis]]
        return Nearest(tuple(line(degrees)), ", ".join(changes) or "as asked")
    return None


def hints(kind: str, flags: Sequence[str], world_size: int, count: int = 3) -> list[str]:
    """Flags of up to ``count`` layouts that the rules accept in place of refused ones, those that change least first;
    empty where the complaint is about something else than the layout."""
    found = resolved_values(kind, [*flags, "--world-size", str(world_size), "--rules-only"], {})["asked"]
    if any(f"{axis}_degree" not in found for axis in FLAGGED):
        return []
    asked = {axis: int(found[f"{axis}_degree"] or 1) for axis in FLAGGED}
    free = asked["sharding"] == -1
    used = asked["mp"] * asked["pp"] * asked["cp"]
    before = {**asked, "sharding": max(1, world_size // used) if free else asked["sharding"], "dp": 1}

    def changed(degrees: Degrees) -> list[str]:
        axes = [axis for axis in FLAGGED if degrees[axis] != before[axis] and not (free and axis == "sharding")]
        return [part for axis in axes for part in (FLAGS[f"{axis}_degree"].spelling, str(degrees[axis]))]

    def line(degrees: Degrees) -> Sequence[str]:
        return (*flags, "--rules-only", "--world-size", str(world_size), *changed(degrees))

    choices = {axis: _near(world_size, before[axis]) for axis in ("mp", "pp", "cp", "ep")}
    found_layouts = (d for d in _layouts(world_size, choices) if d["dp"] == 1 or not free)
    legal = _legal(kind, world_size, before, line, found_layouts)
    return list(dict.fromkeys(" ".join(changed(degrees)) or "as it is" for degrees in islice(legal, count)))


def _legal(
    kind: str, ranks: int, before: Degrees, line: Callable[[Degrees], Sequence[str]], found: Iterable[Degrees]
) -> Iterator[Degrees]:
    """Those of some layouts that the rules accept, the nearest first. line: the command line of one."""
    ordered = sorted(found, key=lambda degrees: (_distance(before, degrees), sorted(degrees.items())))
    for degrees in ordered[:MOST_TRIED]:
        try:
            parse(kind, line(degrees), {"WORLD_SIZE": str(ranks)}, planning=True)
        except ConfigError:
            continue
        yield degrees


def _layouts(ranks: int, choices: Mapping[str, Sequence[int]]) -> Iterator[Degrees]:
    """Every way to use all ranks, or with an axis' degrees out of some; without a choice experts stay together."""

    def degrees_of(axis: str, rest: int) -> list[int]:
        return [degree for degree in divisors(rest) if degree in choices.get(axis, (degree,))]

    for mp in degrees_of("mp", ranks):
        for pp in degrees_of("pp", ranks // mp):
            for cp in degrees_of("cp", ranks // mp // pp):
                rest = ranks // mp // pp // cp
                for sharding in divisors(rest):
                    for ep in choices.get("ep", (1,)):
                        yield {"mp": mp, "pp": pp, "cp": cp, "ep": ep, "sharding": sharding, "dp": rest // sharding}


def _near(ranks: int, wanted: int) -> list[int]:
    """The degrees nearest to the one that was asked for."""
    return sorted(divisors(ranks), key=lambda degree: max(degree, wanted) / max(1, min(degree, wanted)))[:3]


def _distance(before: Degrees, after: Degrees) -> float:
    return sum(weight * abs(math.log2(after[axis] / before[axis])) for axis, weight in _WEIGHTS.items())


def _spelled(degrees: Degrees, asked: Config) -> list[str]:
    training = asked.training
    step = training.micro_batch_size * degrees["dp"] * degrees["sharding"]
    line = [part for axis in FLAGGED for part in (f"--{axis}-degree", str(degrees[axis]))]
    line += ["--hybrid-dp" if degrees["dp"] > 1 else "--no-hybrid-dp", "--dp-degree", str(degrees["dp"])]
    # The last of repeated flags wins: both are given, as either may stand in the line.
    line += ["--global-batch-size", str(training.global_batch_size)]
    return [*line, "--gradient-merge-acc-step", str(max(1, training.global_batch_size // step))]
