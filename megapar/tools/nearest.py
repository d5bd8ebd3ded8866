"""The legal layout for another number of ranks that is nearest to the one that was asked for. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megapar.arguments import Config, parse
from megapar.errors import ConfigError
from megapar.rules.rule import divisors

# A change of how the model is cut moves memory and speed more than one of how many replicas there are.
_WEIGHTS = {"mp": 8.0, "pp": 8.0, "cp": 8.0, "ep": 4.0, "sharding": 2.0, "dp": 1.0}
MOST_TRIED = 5000


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
    before = _degrees(asked)
    found = sorted(_layouts(ranks, before), key=lambda degrees: (_distance(before, degrees), sorted(degrees.items())))
    for degrees in found[:MOST_TRIED]:
        line = (*flags, *_spelled(degrees, asked))
        try:
            parse(kind, line, {"WORLD_SIZE": str(ranks)})
        except ConfigError:
            continue
        changes = [f"{axis} {before[axis]} -> {degrees[axis]}" for axis in before if before[axis] != degrees[axis]]
        return Nearest(line, ", ".join(changes) or "as asked")
    return None


def _degrees(config: Config) -> dict[str, int]:
    grid = config.grid
    return {axis: grid.size(axis) for axis in _WEIGHTS}


def _layouts(ranks: int, before: dict[str, int]) -> Iterator[dict[str, int]]:
    """Every way to use all ranks; experts are spread over as many as before or over a divisor of that."""
    for mp in divisors(ranks):
        for pp in divisors(ranks // mp):
            for cp in divisors(ranks // mp // pp):
                rest = ranks // mp // pp // cp
                for sharding in divisors(rest):
                    for ep in divisors(before["ep"]):
                        yield {"mp": mp, "pp": pp, "cp": cp, "ep": ep, "sharding": sharding, "dp": rest // sharding}


def _distance(before: dict[str, int], after: dict[str, int]) -> float:
    return sum(weight * abs(math.log2(after[axis] / before[axis])) for axis, weight in _WEIGHTS.items())


def _spelled(degrees: dict[str, int], asked: Config) -> list[str]:
    training = asked.training
    step = training.micro_batch_size * degrees["dp"] * degrees["sharding"]
    line = [part for axis in ("mp", "pp", "cp", "ep", "sharding") for part in (f"--{axis}-degree", str(degrees[axis]))]
    line += ["--hybrid-dp" if degrees["dp"] > 1 else "--no-hybrid-dp"]
    # The last of repeated flags wins: both are given, as either may stand in the line.
    line += ["--global-batch-size", str(training.global_batch_size)]
    return [*line, "--gradient-merge-acc-step", str(max(1, training.global_batch_size // step))]
