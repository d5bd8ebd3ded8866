"""Nodes that do not run the same: refused before the first step, with all differences, and started no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megapar.tools.launcher.meeting import meet_at
from tests.faults.cases_rendezvous import Nodes
from tests.faults.job import _ended, end_together, flags_of, launch_node, launched_nodes
from tests.faults.outcome import SHARDING, Outcome, told, verdict

PATIENCE_SECONDS = 120
ASIDE = ("--save-interval", "0")


def text(path: Path, word: str) -> str:
    """A file of some documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"The {word} line number {n} of a text that is long enough.\n" for n in range(400)))
    return str(path)


def refused(statuses: Sequence[int], output: str, steps: int, told: Sequence[str]) -> Outcome:
    """Of nodes that must all be refused by name before a step, and once."""
    good = list(statuses) == [2, 2] and not steps and all(f"[agreement] {one} is " in output for one in told)
    good = good and "Traceback" not in output and output.count(f"[agreement] {told[0]} is ") <= 2
    return Outcome(1, int(good), note="" if good else f"{list(statuses)}, {steps} steps\n{output[-3000:]}")


def launched(own: Callable[[Path], Sequence[Sequence[str]]], *told: str) -> Callable[[Path], Outcome]:
    """Two nodes with flags of their own under ``megapar launch --max-restarts``."""

    def case(folder: Path) -> Outcome:
        folder.mkdir(parents=True)
        place = meet_at("localhost:0")
        options = ("--nnodes", "2", "--rdzv-id", "mixed", "--max-restarts", "2", "--rdzv-endpoint", place.endpoint)
        nodes = [
            Nodes(folder / f"n{number}", [options], flags_of(folder, *SHARDING, *ASIDE, *flags), [{}])
            for number, flags in enumerate(own(folder))
        ]
        try:
            for node in nodes:
                node.wait_for_one(PATIENCE_SECONDS)
            statuses = [status for node in nodes for status in node.statuses()]
        finally:
            for node in nodes:
                node.kill()
        output = "".join(node.output() for node in nodes)
        return refused(statuses, output, len(_ended(folder, 0, "").losses), told)

    return case


def by_torchrun(folder: Path) -> Outcome:
    """Two nodes of torchrun, of two ranks each."""
    folder.mkdir(parents=True)
    place = meet_at("localhost:0")
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    line += ["--rdzv-backend", "c10d", "--rdzv-id", "mixed", "--rdzv-endpoint", place.endpoint]
    with launched_nodes() as nodes:
        for name, lr in (("0", "1e-3"), ("1", "5e-4")):
            flags = flags_of(folder, "--sharding-degree", "4", *ASIDE, "--lr", lr)
            nodes.append(launch_node(folder, name, [*line, "tests/faults/faulty.py", *flags]))
        ended = end_together(folder, nodes)
    good = all(node.returncode for node in nodes) and not ended.losses and "exitcode  : 2" in ended.output
    return told(verdict(good, ended), ended, "[agreement] --lr is 0.001 on ranks ")


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    kind = "nodes that do not run the same"
    yield f"{kind}, --weight-decay", launched(lambda _: ([], ["--weight-decay", "0.5"]), "--weight-decay")
    yield f"{kind}, --lr", launched(lambda _: (["--lr", "1e-3"], ["--lr", "5e-4"]), "--lr")
    yield f"{kind}, --seed", launched(lambda _: ([], ["--seed", "99"]), "--seed")
    yield (
        f"{kind}, --hidden-size and --lr",
        launched(lambda _: ([], ["--hidden-size", "64", "--lr", "1"]), "--hidden-size", "--lr"),
    )

    def data(folder: Path) -> Sequence[Sequence[str]]:
        return [["--data-path", text(folder / word / "text.txt", word)] for word in ("first", "other")]

    yield f"{kind}, data of one name", launched(data, "source 1 of the data")
    yield f"{kind}, under torchrun", by_torchrun
