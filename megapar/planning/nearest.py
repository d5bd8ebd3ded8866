"""Legal layouts nearest to a requested one that the rules refuse, or that must run on another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from megapar.arguments import Config, parse, resolved_values
from megapar.config.config import FLAGS
from megapar.errors import ConfigError
from megapar.schema.rule import divisors

# Changing how the model is split affects memory and speed more than changing the number of replicas.
_WEIGHTS = {"mp": 8.0, "pp": 8.0, "cp": 8.0, "ep": 4.0, "sharding": 2.0, "dp": 1.0}
FLAGGED = ("mp", "pp", "cp", "ep", "sharding")
MOST_TRIED = 5000
MOST_HINTS = 3

Degrees = Mapping[str, int]


@dataclass(frozen=True)
class Nearest:
    """A legal layout.

    Attributes:
        flags: Flags of the run, with those of the layout at the end.
        changes: Description of the changes, such as ``sharding 4 -> 2``.
    """

    flags: tuple[str, ...]
    changes: str


def nearest(kind: str, flags: Sequence[str], requested_ranks: int, ranks: int) -> Nearest | None:
    """Return the layout for ``ranks`` ranks that keeps the global batch and is nearest to the requested one.

    Returns None if no layout is legal. Raises ConfigError if the rules refuse the flags for ``requested_ranks``.

    Args:
        kind: Kind of trainer.
        requested_ranks: Number of ranks that the flags are for.
        ranks: Number of ranks that are available.
    """
    requested = parse(kind, flags, {"WORLD_SIZE": str(requested_ranks)})
    before = {axis: requested.grid.size(axis) for axis in _WEIGHTS}

    # Override a number of ranks that a file or the command line sets.
    world_size = ("--world-size", str(ranks)) if requested.origins["world_size"] != "derived" else ()

    def line(degrees: Degrees) -> Sequence[str]:
        return (*flags, *_spelled(degrees, requested), *world_size)

    # The expert parallel degree stays the same, or becomes a divisor of it.
    candidates = _layouts(ranks, {"ep": divisors(before["ep"])})
    for degrees in _legal(kind, ranks, before, line, candidates):
        changes = [f"{axis} {before[axis]} -> {degrees[axis]}" for axis in before if before[axis] != degrees[axis]]
        return Nearest(tuple(line(degrees)), ", ".join(changes) or "as requested")
    return None


def hints(kind: str, flags: Sequence[str], world_size: int) -> list[str]:
    """Return the flags of a few legal layouts near the refused one, smallest change first.

    The list is empty if the complaint is not about the layout.
    """
    values = resolved_values(kind, [*flags, "--world-size", str(world_size), "--rules-only"], {})["requested"]
    if any(f"{axis}_degree" not in values for axis in FLAGGED):
        return []
    requested = {axis: int(values[f"{axis}_degree"] or 1) for axis in FLAGGED}
    free = requested["sharding"] == -1
    used = requested["mp"] * requested["pp"] * requested["cp"]
    before = {**requested, "sharding": max(1, world_size // used) if free else requested["sharding"], "dp": 1}

    def changed(degrees: Degrees) -> list[str]:
        axes = [axis for axis in FLAGGED if degrees[axis] != before[axis] and not (free and axis == "sharding")]
        return [part for axis in axes for part in (FLAGS[f"{axis}_degree"].spelling, str(degrees[axis]))]

    def line(degrees: Degrees) -> Sequence[str]:
        return (*flags, "--rules-only", "--world-size", str(world_size), *changed(degrees))

    choices = {axis: _near(world_size, before[axis]) for axis in ("mp", "pp", "cp", "ep")}
    candidates = (d for d in _layouts(world_size, choices) if d["dp"] == 1 or not free)
    legal = _legal(kind, world_size, before, line, candidates)
    return list(dict.fromkeys(" ".join(changed(degrees)) or "as it is" for degrees in islice(legal, MOST_HINTS)))


def _legal(
    kind: str, ranks: int, before: Degrees, line: Callable[[Degrees], Sequence[str]], candidates: Iterable[Degrees]
) -> Iterator[Degrees]:
    """Yield the candidates that the rules accept, nearest first. line: Returns the command line of a layout."""
    ordered = sorted(candidates, key=lambda degrees: (_distance(before, degrees), sorted(degrees.items())))
    for degrees in ordered[:MOST_TRIED]:
        try:
            parse(kind, line(degrees), {"WORLD_SIZE": str(ranks)}, planning=True)
        except ConfigError:
            continue
        yield degrees


def _layouts(ranks: int, choices: Mapping[str, Sequence[int]]) -> Iterator[Degrees]:
    """Yield all layouts of ``ranks`` ranks. choices: Allowed degrees by axis, by default all; for ep only 1."""

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
    """Return the three degrees nearest to ``wanted``."""
    return sorted(divisors(ranks), key=lambda degree: max(degree, wanted) / max(1, min(degree, wanted)))[:3]


def _distance(before: Degrees, after: Degrees) -> float:
    return sum(weight * abs(math.log2(after[axis] / before[axis])) for axis, weight in _WEIGHTS.items())


def _spelled(degrees: Degrees, requested: Config) -> list[str]:
    training = requested.training
    step = training.micro_batch_size * degrees["dp"] * degrees["sharding"]
    line = [part for axis in FLAGGED for part in (f"--{axis}-degree", str(degrees[axis]))]
    line += ["--hybrid-dp" if degrees["dp"] > 1 else "--no-hybrid-dp", "--dp-degree", str(degrees["dp"])]
    # The last of repeated flags wins. Set both of these, because the command line may contain either.
    line += ["--global-batch-size", str(training.global_batch_size)]
    return [*line, "--gradient-merge-acc-step", str(max(1, training.global_batch_size // step))]
