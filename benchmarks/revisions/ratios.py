"""Figures of two trees of megapar by round, as ratios with their 95 % intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.contest import SLOWER, Figures, paired, paired_interval
from benchmarks.support.table import machine, print_json, print_table

HERE = Path(__file__).resolve().parents[2]
MINE, OTHER = "this tree", "the other"


def trees(other: Path) -> dict[str, Path]:
    """Return the folders of both trees by name."""
    return {MINE: HERE, OTHER: other.resolve()}


def compare(rounds: Sequence[dict[str, Figures]]) -> dict[str, dict[str, Any]]:
    """Return the ratio of this tree's time to the other's, and its 95 % interval, by figure.

    Args:
        rounds: Figures of each round by tree.

    Raises RuntimeError if the trees have no figure in common.
    """
    common = set.intersection(*(set(done) for both in rounds for done in both.values()))
    if not common:
        raise RuntimeError("the trees have no figure in common")
    result: dict[str, dict[str, Any]] = {}
    for path in sorted(common):
        mine, theirs = ([both[tree] for both in rounds] for tree in (MINE, OTHER))
        low, high = paired_interval(mine, theirs, path)
        ratio = paired(mine, theirs, path)
        slower = low > 1.0 and ratio > SLOWER
        result[path] = {"ratio": ratio, "interval": [low, high], "slower": slower}
    return result


def report(name: str, rounds: int, found: dict[str, dict[str, Any]], results: Path | None) -> bool:
    """Print a table and a line of JSON, and append the line to ``results``. Returns False if this tree is slower."""
    rows = [
        (path, f"{figure['ratio']:.3f}", "{:.3f} to {:.3f}".format(*figure["interval"]), "slower" * figure["slower"])
        for path, figure in found.items()
    ]
    print_table((name, "time / the other's", "95 % interval", ""), rows)
    result = {"benchmark": name, "machine": machine("cpu"), "rounds": rounds, "figures": found}
    print_json(result)
    if results:
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return not any(figure["slower"] for figure in found.values())
