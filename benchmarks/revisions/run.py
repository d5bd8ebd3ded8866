"""Benchmarks of two trees of megapar, in turns. See scripts/compare_benchmarks.sh.

Every round runs a benchmark once in each tree, each with the megapar of that tree. A figure is compared if both print
it. Peers, which are the same code for both, show what is chance. ``steps`` compares training steps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.revisions.ratios import compare, compare_all, report
from benchmarks.support.contest import Figures


@dataclass(frozen=True)
class Entry:
    """A benchmark that is compared.

    Attributes:
        line: Module and arguments.
        figures: Pattern of the compared figures' paths in its line of JSON, such as ``seconds/save``.
        speeds: The figures are speeds, not times.
    """

    line: tuple[str, ...]
    figures: str
    speeds: bool = False


def _entry(line: str, figures: str, *, speeds: bool = False) -> Entry:
    return Entry(tuple(line.split()), figures, speeds)


ENTRIES = {
    "checkpoint": _entry("benchmarks.checkpoint.run --megabytes 256 --rounds 1", "seconds/(save|load.*|torch.*)"),
    "context parallel": _entry("benchmarks.context_parallel.run --part speed --rounds 1", "speed/(?!one process).*"),
    "data": _entry(
        "benchmarks.data.run --part prepare --prepare-megabytes 8 --rounds 1",
        "prepare/.*/(one|all|plain.*)",
        speeds=True,
    ),
    "data, sentencepiece": _entry(
        "benchmarks.data.run --part prepare --tokenizer sentencepiece --rounds 1",
        "prepare/.*/(one|all|plain.*)",
        speeds=True,
    ),
    "data, loader": _entry("benchmarks.data.run --part loader", "loader/(trained|read)", speeds=True),
    "data, open": _entry("benchmarks.data.run --part open", "open/(seconds|sample_seconds)"),
    "convert": _entry(
        "benchmarks.convert.run --hidden 2048 --inner 7168 --experts 3",
        "(hf-to-megapar|megapar-to-hf)/(seconds|peak_bytes)",
    ),
    "pipeline": _entry("benchmarks.pipeline.run --rounds 1 --milliseconds 20", "bubble/.*/seconds"),
    "recompute": _entry("benchmarks.recompute.run --rounds 1", "rounds/.*/seconds"),
    "guards": _entry("benchmarks.guards.run --rounds 6 --steps 1", "step_seconds"),
    "sharding": _entry(
        "benchmarks.sharding.run --part machine --dtype fp32 --rounds 1", ".*tokens_per_second/.*", speeds=True
    ),
    "tensor parallel": _entry("benchmarks.tensor_parallel.run --part speed --rounds 1", "speed/tokens.*", speeds=True),
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the path and the value of every number in a result."""
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from leaves(child, f"{path}/{name}" if path else str(name))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def figures(entry: Entry, tree: Path) -> Figures:
    """Run a benchmark in a tree and return its figures as times.

    Raises RuntimeError if it printed none that are compared.
    """
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", *entry.line]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")] or ["{}"]
    found = {path: value for path, value in leaves(json.loads(lines[-1])) if re.fullmatch(entry.figures, path)}
    if not found:
        printed = f"status {done.returncode}\n{lines[-1][:2000]}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{' '.join(command)} in {tree} printed nothing that matches {entry.figures}: {printed}")
    return {path: 1 / value if entry.speeds else value for path, value in found.items() if value}


def race(name: str, folders: Mapping[str, Path], rounds: int, results: Path | None) -> bool:
    """Run a benchmark in both trees in turns, and print a table and a line of JSON.

    Returns False if this tree is slower or if the benchmark failed in one of the trees, which does not stop the others.
    """
    done: list[dict[str, Figures]] = []
    try:
        for number in range(rounds):
            order = list(folders) if number % 2 else list(reversed(folders))
            done.append({tree: figures(ENTRIES[name], folders[tree]) for tree in order})
        found = compare(done)
    except RuntimeError as error:
        print(f"{name}: {error}\n", file=sys.stderr)
        return False
    return report(name, rounds, found, results)


if __name__ == "__main__":
    sys.exit(compare_all(__doc__, race, ENTRIES, list(ENTRIES), rounds=6))
