"""Figures of two trees of megapar by round, as ratios with their 95 % intervals."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.contest import SLOWER, Figures, paired, paired_interval
from benchmarks.support.table import machine, print_json, print_table

HERE = Path(__file__).resolve().parents[2]
MINE, OTHER = "this tree", "the other"
Comparison = Callable[[str, Mapping[str, Path], Any, Path | None], bool]


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


def compare_all(
    title: str | None, race: Comparison, entries: Mapping[str, Any], default: Sequence[str], rounds: int | None = None
) -> int:
    """Compare what the command line names; return 1 if this tree is slower in one of them, or one failed.

    Args:
        title: What ``--help`` says first.
        race: Compares one entry, given its name, the folders of both trees, the rounds and a file for results.
        entries: What can be compared, by name.
        default: Names if the command line has none.
        rounds: Rounds if the command line does not set them; None: the entry's own.
    """
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another revision")
    chosen = "all" if set(default) == set(entries) else ", ".join(map(repr, default))
    named = f"any of {', '.join(map(repr, entries))}; default: {chosen}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=named)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--results", type=Path, help="add a line of JSON for each entry to this file")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 6:
        parser.error(f"--rounds {options.rounds}: an interval takes at least 6")
    if unknown := [name for name in options.names if name not in entries]:
        parser.error(f"no entries {unknown}; choose from {list(entries)}")
    folders = {MINE: HERE, OTHER: options.other.resolve()}
    passed = [race(name, folders, options.rounds, options.results) for name in options.names or default]
    return int(not all(passed))
