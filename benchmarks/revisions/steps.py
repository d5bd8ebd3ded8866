"""Training steps of two trees of megapar, in turns. See scripts/compare_speed.sh.

The processes of both trees stay alive and take turns step by step, so that the ratio is far steadier than that of two
runs. Each has the megapar and the benchmark of its tree, because names of modules differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.revisions.ratios import OTHER, compare, compare_all, report
from benchmarks.sharding.shape import OURS
from benchmarks.step_hiding.ways import WAYS
from benchmarks.support.contest import Contest, Figures, Rank, place
from benchmarks.support.slow_link import SlowLink, slow_link
from benchmarks.throughput.run import OWN_FLAGS, prepare

Lines = dict[str, list[str]]  # module and arguments by name; "{rank}" in an argument is the number of the process


@dataclass(frozen=True)
class Entry:
    """Steps that are compared.

    Attributes:
        lines: Returns the command lines, given the folder of a tree, the other tree and a folder for weights.
        ranks: Processes of each contestant. They share the cores of the machine.
        rate: Limit of a link between two processes, as tc writes it; None: no link.
        rounds: Rounds if the command line does not set them.
        requests: Kinds of steps that a process runs.
    """

    lines: Callable[[Path, Path, Path], Lines]
    ranks: int
    rate: str | None = None
    rounds: int = 21
    requests: Sequence[str] = ("step",)


def _quickstart(tree: Path, other: Path, weights: Path) -> Lines:
    """Both trees read the configuration of the other one, which is usually older: it would refuse a newer key."""
    config = str(other / "configs/quickstart.yaml")
    return {"": ["benchmarks.throughput.quickstart_rank", "--expect", str(tree), "--config", config]}


def _sharding(tree: Path, other: Path, weights: Path) -> Lines:
    common = ["benchmarks.sharding.ours_rank", "--device", "cpu", "--", "--dtype", "fp32", "--global-batch-size", "2"]
    return {name: [*common, *flags] for name, flags in OURS.items()}


def _race(model: str, ranks: int) -> Callable[[Path, Path, Path], Lines]:
    def lines(tree: Path, other: Path, weights: Path) -> Lines:
        prepare(weights, "cpu", [model])
        flags = OWN_FLAGS.get(("cpu", ranks), "").split()
        line = ["benchmarks.throughput.ours_rank", "--device", "cpu", "--model", model, "--dtype", "fp32"]
        return {"": [*line, str(weights / f"cpu-{model}"), "--", *flags]}

    return lines


def _hiding(tree: Path, other: Path, weights: Path) -> Lines:
    rows = ["--rows", "benchmarks.step_hiding.ways:WAYS", "--ranks", "2", "--node", "1"]
    return {"": ["benchmarks.support.trainer_rank", *rows, "--rank", "{rank}"]}


ENTRIES = {
    "quickstart": Entry(_quickstart, 2),
    "sharding, link": Entry(_sharding, 2, rate="258mbit", rounds=8),
    "communication hiding, link": Entry(_hiding, 2, rate="300mbit", rounds=8, requests=tuple(WAYS)),
    "ERNIE": Entry(_race("ernie", 1), 1, rounds=12),
    "experts": Entry(_race("moe", 1), 1),
    "experts, two processes": Entry(_race("moe", 2), 2),
}


@dataclass(frozen=True)
class _Contestant:
    """Processes of one tree with one command line."""

    line: str
    tree: str
    ranks: Sequence[Rank]

    @property
    def name(self) -> str:
        return f"{self.line}, {self.tree}".removeprefix(", ")


def _contestants(
    entry: Entry, folders: Mapping[str, Path], folder: Path, link: SlowLink | None
) -> Iterator[_Contestant]:
    """Yield the contestants of all trees, whose files are in ``folder``."""
    for tree, path in folders.items():
        home = folder / tree.replace(" ", "-")
        home.mkdir()
        for name in ("megapar", "benchmarks"):
            (home / name).symlink_to(path / name)
        env = {"PYTHONPATH": str(home), "PYTHONSAFEPATH": "1"}
        _check(path, env)
        lines = entry.lines(path, folders[OTHER], folder / "weights")
        for meeting, (name, (module, *argv)) in enumerate(lines.items()):
            meet = ["--rendezvous", f"file://{home / f'meet{meeting}'}"] if entry.ranks > 1 else []
            command = [sys.executable, "-m", module, *meet, *argv]
            ranks = [_rank(number, entry.ranks, command, env, link) for number in range(entry.ranks)]
            yield _Contestant(name, tree, ranks)


def _check(tree: Path, env: Mapping[str, str]) -> None:
    """Raise RuntimeError unless a process with ``env`` has the megapar of ``tree``."""
    look = [sys.executable, "-c", "import megapar; print(megapar.__file__)"]
    done = subprocess.run(look, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    if (file := Path(done.stdout.strip()).resolve()) != tree / "megapar/__init__.py":
        raise RuntimeError(f"megapar would be {file}, not that of {tree}")


def _rank(number: int, ranks: int, command: Sequence[str], env: Mapping[str, str], link: SlowLink | None) -> Rank:
    env = {**env, **place(number, ranks, max(1, (os.cpu_count() or 1) // ranks))}
    command = [argument.replace("{rank}", str(number)) for argument in command]
    if link is None:
        return Rank(command, env)
    there = link.rank(number, command)
    return Rank(there.argv, {**env, **there.env}, there.core)


def turns(entry: Entry, folders: Mapping[str, Path], rounds: int) -> list[dict[str, Figures]]:
    """Return the seconds of a step by figure, of each tree in each round."""
    with tempfile.TemporaryDirectory() as folder, slow_link() if entry.rate else nullcontext() as link:
        if link is not None and entry.rate is not None:
            link.set_rate(entry.rate)
        running = list(_contestants(entry, folders, Path(folder), link))
        with Contest({one.name: one.ranks for one in running}) as contest:
            steps = {
                (one.line, one.tree, request): (one.name, request) for one in running for request in entry.requests
            }
            times = contest.rounds(rounds, steps, warmup=3)
    done: list[dict[str, Figures]] = [{tree: {} for tree in folders} for _ in range(rounds)]
    for (line, tree, request), taken in times.items():
        figure = " ".join(part for part in (line, request) if part)
        for number, figures in enumerate(taken):
            done[number][tree][figure] = figures["seconds"]
    return done


def race(name: str, folders: Mapping[str, Path], rounds: int | None, results: Path | None) -> bool:
    """Compare the steps of an entry, and print a table and a line of JSON.

    Returns False if this tree is slower or if a process failed, which does not stop the other entries.
    """
    rounds = rounds or ENTRIES[name].rounds
    try:
        found = compare(turns(ENTRIES[name], folders, rounds))
    except RuntimeError as error:
        print(f"{name}: {error}\n", file=sys.stderr)
        return False
    return report(name, rounds, found, results)


if __name__ == "__main__":
    sys.exit(compare_all(__doc__, race, ENTRIES, ["quickstart"]))
