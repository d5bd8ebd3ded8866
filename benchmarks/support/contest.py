"""Contestants that take turns: each is a set of processes that stay alive and work only when it is their turn.

Ratios on a shared machine drift with what else runs there. Interleaved turns expose all contestants to the same load,
and the median over many rounds drops its peaks.

    with Contest({"ours": [Rank(argv, env), ...], "peer": [...]}) as contest:
        seconds = contest.rounds(7, {"ours fast": ("ours", "fast"), "peer": ("peer", "")})

A rank process calls ``serve(work)``; ``work(request)`` does one turn and returns its figures.
"""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

Figures = dict[str, float]
Name = TypeVar("Name")
SLOWER = 1.03  # a median ratio of times above this, with an interval above 1, is slower
ANSWER = "answer: "  # begins the lines of ``serve``


@dataclass(frozen=True)
class Rank:
    """Command line of a process, and its environment in addition to the parent's.

    ``core``: the core that it is bound to, modulo the number of cores; None: any. If as many ranks as cores compute,
    the threads that serve the network make an unbound rank share a core with another for a tenth of a second at a time.
    ``errors``: a file that its standard error is appended to; None: the parent's.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    core: int | None = None
    errors: Path | None = None


def place(rank: int, ranks: int, threads: int = 1) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "OMP_NUM_THREADS": threads}
    return {name: str(number) for name, number in numbers.items()}


class Contest:
    """Running contestants, whose processes end with the context."""

    def __init__(self, contestants: Mapping[str, Sequence[Rank]]) -> None:
        self._contestants = contestants
        self._processes: dict[str, list[subprocess.Popen[str]]] = {}

    def __enter__(self) -> Contest:
        for name, ranks in self._contestants.items():
            self._processes[name] = [_start(rank) for rank in ranks]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (p for group in self._processes.values() for p in group):
            if kind is not None:
                process.kill()
            elif process.stdin is not None:
                process.stdin.close()
            process.wait()

    def turn(self, name: str, request: str, seconds: float = math.inf) -> Figures:
        """Return the figures of one turn, each the highest among the ranks.

        Raises RuntimeError if a rank ended, and TimeoutError if one has not answered within ``seconds``.
        """
        until = time.monotonic() + seconds
        group = self._processes[name]
        for process in group:
            assert process.stdin is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise _ended(name, process) from None
        answers = [_answer(name, process, until) for process in group]
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def rounds(self, count: int, entries: Mapping[Name, tuple[str, str]], warmup: int = 1) -> dict[Name, list[Figures]]:
        """Run ``count`` rounds in which every entry (contestant, request) has one turn, after ``warmup`` other rounds.

        Every other round is in reverse order, so that no entry always runs after the same one.
        """
        results: dict[Name, list[Figures]] = {name: [] for name in entries}
        for number in range(-warmup, count):
            order = list(entries.items())
            for name, (contestant, request) in order if number % 2 else reversed(order):
                figures = self.turn(contestant, request)
                if number >= 0:
                    results[name].append(figures)
        return results


def _answer(name: str, process: subprocess.Popen[str], until: float) -> Figures:
    """Return the next answer. Lines that libraries print before it are passed on."""
    for line in _lines(process, until):
        if line.startswith(ANSWER):
            figures: Figures = json.loads(line.removeprefix(ANSWER))
            return figures
        sys.stderr.write(line.lstrip("\n"))
    raise _ended(name, process)


def _lines(process: subprocess.Popen[str], until: float) -> Iterator[str]:
    """Yield the lines that a process prints. Raises TimeoutError at ``until``, on ``time.monotonic``.

    The end of the pipe is not awaited: workers of a compiler may hold it open after the process.
    """
    assert process.stdout is not None
    pipe, text = process.stdout.fileno(), b""
    while select.select([pipe], [], [], None if until == math.inf else max(0.0, until - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            return
        *lines, text = (text + part).split(b"\n")
        yield from (line.decode(errors="replace") + "\n" for line in lines)
    raise TimeoutError("no answer in time")


def _ended(name: str, process: subprocess.Popen[str]) -> RuntimeError:
    return RuntimeError(f"a process of {name} ended with status {process.wait()}: {process.args!r}")


def _start(rank: Rank) -> subprocess.Popen[str]:
    pipe, env = subprocess.PIPE, {**os.environ, **rank.env}
    with nullcontext() if rank.errors is None else rank.errors.open("ab") as errors:
        process = subprocess.Popen(rank.argv, env=env, stdin=pipe, stdout=pipe, stderr=errors, text=True)
    if rank.core is not None:  # before it has threads: they inherit it
        os.sched_setaffinity(process.pid, {rank.core % (os.cpu_count() or 1)})
    return process


def median(rounds: Sequence[Figures], key: str = "seconds") -> float:
    """Return the median of one figure."""
    return statistics.median(figures[key] for figures in rounds)


def paired(rounds: Sequence[Figures], others: Sequence[Figures], key: str = "seconds") -> float:
    """Return the median over rounds of the ratio of a figure to another entry's in the same round.

    If the machine's speed drifts between rounds, this is steadier than the ratio of two medians.
    """
    return statistics.median(_ratios(rounds, others, key))


def paired_interval(
    rounds: Sequence[Figures], others: Sequence[Figures], key: str = "seconds", *, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the two ratios between which the true median of ``paired`` lies, with at least this confidence.

    They are two of the ordered ratios. The number of n ratios on either side of a median is binomial, whatever their
    distribution. Source: Conover, Practical Nonparametric Statistics, 3.2. Raises ValueError for too few rounds (fewer
    than six for 95 %).
    """
    ordered = sorted(_ratios(rounds, others, key))
    count = len(ordered)
    outside, left_out = 0.0, 0
    while (outside := outside + math.comb(count, left_out) / 2**count) <= (1 - confidence) / 2:
        left_out += 1
    if not left_out:
        raise ValueError(f"{count} rounds cannot bound a median with {confidence:.0%} confidence; take more rounds")
    return ordered[left_out - 1], ordered[count - left_out]


def _ratios(rounds: Sequence[Figures], others: Sequence[Figures], key: str) -> list[float]:
    return [mine[key] / theirs[key] for mine, theirs in zip(rounds, others, strict=True)]


def serve(work: Callable[[str], Figures]) -> None:
    """Answer requests until the parent closes the pipe. Never returns."""
    for line in sys.stdin:
        sys.stdout.write(f"\n{ANSWER}{json.dumps(work(line.strip()))}\n")
        sys.stdout.flush()
    os._exit(0)  # gloo's threads at times abort an orderly exit
