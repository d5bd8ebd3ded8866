"""Jobs of real processes with a fault in them, and what came of it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.tools.launcher.meeting import meet_at
from tests.support.process import clean_environ, started
from tests.support.training import COMMON, SMALL, last_wins

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 300  # of one start
FP64 = ("--dtype", "fp64")


@dataclass(frozen=True)
class Fault:
    """See faulty.py."""

    kind: str
    rank: int = 0
    iteration: int = 0
    attempts: tuple[int, ...] = (0,)
    seed: int = 0
    seconds: float = 1.0
    name: str = ""
    harm: str = ""


@dataclass(frozen=True)
class Ended:
    """How a job ended. losses, samples: by iteration, of the metrics file; samples that had been read then. strikes: of
    the fault. starts: first steps after each start. output: everything it said.
    """

    status: int
    losses: dict[int, float]
    samples: dict[int, int]
    strikes: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    output: str

    @property
    def lost_steps(self) -> list[int]:
        """Per strike that was followed by a start: steps that were done and had to be done again."""
        return [max(0, strike["finished"] - (start["first"] - 1)) for strike, start in self._followed()]

    @property
    def seconds_to_next_step(self) -> list[float]:
        """Per strike: until the first step after it was done."""
        return [start["at"] - strike["at"] for strike, start in self._followed()]

    def _followed(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each strike with the next step that was done; strikes that let none be done in between share it."""
        for strike in self.strikes:
            later = [start for start in self.starts if start["at"] > strike["at"]]
            if later:
                yield strike, later[0]


def flags_of(folder: Path, *flags: str) -> list[str]:
    """A small model with a checkpoint every second step."""
    metrics = ("--metrics-jsonl", str(folder / "metrics.jsonl"), "--log-interval", "1")
    saves = ("--save", str(folder / "c"), "--load", str(folder / "c"), "--save-interval", "2")
    return last_wins((*SMALL["moe"], *COMMON), (*FP64, *metrics, *saves, *flags))


def run_job(
    folder: Path,
    world_size: int,
    fault: Fault,
    *flags: str,
    restarts: int = 0,
    launcher: Sequence[str] = (),
    ignored: Sequence[signal.Signals] = (),
) -> Ended:
    """Launch, wait, and read what was written. ignored: signals, as by nohup."""
    line = [*started(ignored), sys.executable, "-m", "megapar.tools.main", "launch"]
    line += ["--nproc-per-node", str(world_size), "--max-restarts", str(restarts), "--stop-timeout", "2"]
    line += ["--warm-start", *launcher]  # as for megapar's own scripts
    return run_line(folder, line, fault, *flags, seconds=PATIENCE_SECONDS * (1 + restarts))


def run_line(folder: Path, line: Sequence[str], fault: Fault, *flags: str, seconds: float = PATIENCE_SECONDS) -> Ended:
    """As ``run_job``, with another launcher. It has ended when all have that could write to its output."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [*line, "tests/faults/faulty.py", *flags_of(folder, *flags)]
    return ended_as(folder, command, _environ(folder, fault), seconds)


def ended_as(folder: Path, line: Sequence[str], environ: dict[str, str], seconds: float = PATIENCE_SECONDS) -> Ended:
    """The end of a command."""
    output, errors = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(line, env=environ, cwd=ROOT, text=True, stdout=output, stderr=errors, timeout=seconds)
    return _ended(folder, done.returncode, done.stdout)


def _environ(folder: Path, fault: Fault) -> dict[str, str]:
    spec = {**fault.__dict__, "notes": str(folder / "strikes.jsonl")}
    return clean_environ(OMP_NUM_THREADS="1", MEGAPAR_TEST_FAULT=json.dumps(spec))


def _ended(folder: Path, status: int, output: str) -> Ended:
    records = _lines(folder / "metrics.jsonl")
    return Ended(
        status,
        {record["iteration"]: record["loss"] for record in records},
        {record["iteration"]: record["consumed_samples"] for record in records},
        _lines(folder / "strikes.jsonl"),
        _lines(folder / "strikes.jsonl.starts"),
        output,
    )


# Nodes that are gone are missed after 2 s. Others are waited for as long as a busy machine takes to start them.
PATIENT = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=8"


TOGETHER = "last_call_timeout=200"  # nothing goes on without the second node, however late it starts


def run_nodes(folder: Path, ranks: int, iteration: int, *flags: str, another: bool = False) -> Ended:
    """An elastic job of one or two nodes on this machine, which meet in this process; the second is killed in a step.

    another: a third node comes in its place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "pretrain_moe.py"  # only the trainers' scripts get another layout
    script.write_text(f"import runpy\nrunpy.run_path({str(ROOT / 'tests/faults/faulty.py')!r}, run_name='__main__')\n")
    place = meet_at("localhost:0")
    line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nnodes", "1:2", "--nproc-per-node", str(ranks)]
    line += ["--max-restarts", "3", "--rdzv-id", "job", "--rdzv-conf", PATIENT, "--rdzv-endpoint", place.endpoint]
    line += [str(script), *flags_of(folder, *flags)]

    killed = Fault("kill node", iteration=iteration, attempts=(0, 1))
    with launched_nodes() as nodes:
        nodes += [launch_node(folder, "first", line), launch_node(folder, "second", line, killed)]
        if another:
            nodes[1].wait(PATIENCE_SECONDS)
            nodes[1] = launch_node(folder, "third", line)
        return end_together(folder, nodes if another else nodes[:1])


def run_apart(folder: Path, nnodes: str, seconds: int, *flags: str) -> Ended:
    """A job of two nodes of one rank, which meet in this process; the clock of the second is ``seconds`` ahead."""
    folder.mkdir(parents=True, exist_ok=True)
    place = meet_at("localhost:0")
    options = ["--nnodes", nnodes, "--rdzv-id", "job", "--rdzv-conf", TOGETHER, "--rdzv-endpoint", place.endpoint]
    command = ["launch", *options, "--warm-start", "tests/faults/faulty.py", *flags_of(folder, *flags)]
    heads = (["-m", "megapar.tools.main"], ["-m", "tests.faults.late", str(seconds)])
    with launched_nodes() as nodes:
        nodes += [
            launch_node(folder, str(number), [sys.executable, *head, *command]) for number, head in enumerate(heads)
        ]
        return end_together(folder, nodes)


@contextlib.contextmanager
def launched_nodes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of nodes, none of which is left behind."""
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def launch_node(folder: Path, name: str, line: Sequence[str], fault: Fault | None = None) -> subprocess.Popen[bytes]:
    """The launcher of a node, whose output goes to a file of its name."""
    with (folder / f"{name}.log").open("w") as log:
        environ = _environ(folder, fault or Fault("none", attempts=()))
        return subprocess.Popen(line, env=environ, cwd=ROOT, stdout=log, stderr=log)


def end_together(folder: Path, nodes: Sequence[subprocess.Popen[bytes]]) -> Ended:
    """The end of a job whose nodes end by themselves."""
    statuses = [node.wait(PATIENCE_SECONDS) for node in nodes]
    return _ended(folder, max(statuses), "".join(path.read_text() for path in sorted(folder.glob("*.log"))))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
