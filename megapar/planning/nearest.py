"""The legal layouts nearest to a refused one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from megapar.arguments import parse, resolved_values
from megapar.config.config import FLAGS
from megapar.errors import ConfigError
from megapar.rules.rule import divisors

AXES = ("mp_degree", "pp_degree", "cp_degree", "ep_degree", "sharding_degree")
TRIED = 160


def nearest(kind: str, line: Sequence[str], world_size: int, count: int = 3) -> list[str]:
    """Flags of up to ``count`` layouts that the rules accept, those that change least first; empty where the complaint
    is about something else than the layout."""
    values = resolved_values(kind, [*line, "--world-size", str(world_size), "--validate-only"], {})
    asked = {axis: int(values["asked"].get(axis) or 1) for axis in AXES if axis in values["asked"]}
    if len(asked) < len(AXES):
        return []
    found: list[str] = []
    for candidate in list(_candidates(asked, world_size))[:TRIED]:
        flags = [part for axis, degree in candidate.items() for part in (FLAGS[axis].spelling, str(degree))]
        if _legal(kind, [*line, *flags], world_size):
            changes = [
                f"{FLAGS[axis].spelling} {degree}" for axis, degree in candidate.items() if degree != asked[axis]
            ]
            found.append(" ".join(changes) or "as it is")
        if len(found) == count:
            break
    return found


def _candidates(asked: dict[str, Any], world_size: int) -> Iterator[dict[str, int]]:
    """Layouts in the order of their distance: changed axes first, then factors of change."""
    degrees = divisors(world_size)
    near = {axis: sorted({asked[axis], *_near(degrees, asked[axis])}) for axis in AXES[:4]}
    free = [asked["sharding_degree"], -1] if asked["sharding_degree"] != -1 else [-1]
    options = [
        dict(zip(AXES, combination, strict=True)) for combination in product(*(near[axis] for axis in AXES[:4]), free)
    ]

    def distance(option: dict[str, int]) -> tuple[int, float]:
        moved = [axis for axis in AXES if option[axis] != asked[axis]]
        return len(moved), sum(_ratio(option[axis], asked[axis]) for axis in moved if axis != "sharding_degree")

    yield from sorted(options, key=distance)[1:]


def _near(degrees: Sequence[int], wanted: int) -> list[int]:
    return sorted(degrees, key=lambda degree: _ratio(degree, wanted))[:3]


def _ratio(degree: int, wanted: int) -> float:
    return max(degree, wanted) / max(1, min(degree, wanted))


def _legal(kind: str, line: list[str], world_size: int) -> bool:
    try:
        parse(kind, [*line, "--validate-only", "--world-size", str(world_size)], {})
    except ConfigError:
        return False
    return True
