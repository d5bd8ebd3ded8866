"""Ranks for tests: a warm pool of processes per world size, and one call that runs a function on all of them.

    def check(rank: int, world_size: int, value: float) -> float: ...   # at the top level of a test module
    results = run_ranks(4, check, 1.5)                                  # one result per rank

Workers are forked once from a server that has torch imported, and serve every call of the pytest session. Each call
has its own file rendezvous, so that no port is taken and no group outlives its call. A failure on any rank becomes one
``RanksFailed`` with the failures of all ranks; the pool is then discarded and the next call gets a new one, as it does
if too many of gloo's threads remain. The environment of the workers is that at the first call, plus RANK, WORLD_SIZE,
LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.support.worker import RELEASE, STOP, Call, Report, serve

R = TypeVar("R")
S = TypeVar("S")

# The server imports these once; otherwise each worker of a pool would.
# Torch's compiler is imported by its optimizers, at the first step.
PRELOADED = [
    *("pytest", "torch.distributed.fsdp", "torch._dynamo", "torch.optim"),
    *("megapar.trainer", "megapar.tools.launcher.agent"),
]
# gloo's threads outlive their groups if something holds these (DTensor's caches hold every mesh) and wake a hundred
# times a second: a pool with more is replaced, which takes half a second.
MOST_THREADS = 16
# After a first failure the other ranks get this long to report theirs (their peers' connections are closed by then).
GRACE_SECONDS = 5.0


class RanksFailed(AssertionError):
    """At least one rank failed, died or did not answer.

    Attributes:
        failures: Rank -> description of its failure, in the order in which they were noticed.
        signals: Rank -> number of the signal that killed it, for ranks that this kit did not kill.
    """

    def __init__(self, title: str, failures: dict[int, str], signals: dict[int, int]) -> None:
        self.failures = failures
        self.signals = signals
        parts = [f"----- rank {rank} -----\n{text.rstrip()}" for rank, text in failures.items()]
        super().__init__("\n".join([title, *parts]))


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function`` on every rank of a warm pool and return the results in rank order.

    With ``group`` it is called as ``function(rank, world_size, *args)``, after the default process group of ``backend``
    ("gloo", or "late" of tests.support.late) was made. Without ``group`` it is called as ``function(rank,
    world_size, rendezvous, *args)``, where ``rendezvous`` is the path of a file for
    ``init_method=f"file://{rendezvous}"``. Remaining groups are destroyed after every rank has finished.

    After ``timeout`` seconds the stacks of all ranks that have not finished are collected and the pool is killed.
    Function, arguments and results are pickled; tensors are copied. Calls on different numbers of ranks may run at
    the same time, from threads of the test; those on the same number run one after the other. Raises RanksFailed.
    """
    with _TURNS[world_size]:
        return _in_turn(world_size, function, args, timeout, group, backend)


def _in_turn(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, group: bool, backend: str
) -> list[Any]:
    """Call ``function`` on the pool, which no other thread uses."""
    with _STARTING:
        pool = _POOLS.get(world_size)
        if pool is not None and pool.threads() > MOST_THREADS:
            _POOLS.pop(world_size).close()
            pool = None
        if pool is None or not pool.alive():
            pool = _POOLS[world_size] = Pool(world_size)
    try:
        return pool.run(function, args, timeout, group, backend)
    except BaseException:
        _POOLS.pop(world_size).close()
        raise


def forked() -> ForkServerContext:
    """Return the context whose processes start with torch and the trainer imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the server imports torch
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def side_by_side(world_size: int, layout: Callable[[], R], alone: Callable[[], S]) -> tuple[R, S]:
    """Return the results of a call on ``world_size`` ranks and of one on a single rank, which run at the same time.

    Ranks wait for each other most of the time, and leave the cores to the single one.
    """
    if world_size == 1:  # they are calls of one process
        return layout(), alone()
    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(alone)
        return layout(), other.result()


@dataclass(frozen=True)
class Worker:
    """The parent's end of one worker process.

    Attributes:
        process: The process.
        connection: Connection to it.
        stacks: File that it writes its stacks to.
    """

    process: ForkServerProcess
    connection: Connection
    stacks: Path

    def said(self) -> str:
        """Return its stacks; "" before it has begun."""
        return self.stacks.read_text() if self.stacks.exists() else ""


class Pool:
    """``world_size`` warm processes, each of which is the same rank in every call."""

    def __init__(self, world_size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="megapar-ranks-"))
        self.calls = 0
        context = forked()
        self.workers = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            stacks = self.folder / f"stacks-{rank}.txt"
            process = context.Process(target=serve, args=(theirs, rank, world_size, stacks), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(Worker(process, ours, stacks))

    def alive(self) -> bool:
        """Return True if every worker can take a call."""
        return all(worker.process.is_alive() for worker in self.workers)

    def threads(self) -> int:
        """Return the threads of the worker with the most; 0 if the system does not show them."""
        folders = [Path(f"/proc/{worker.process.pid}/task") for worker in self.workers]
        return max(len(os.listdir(folder)) if folder.is_dir() else 0 for folder in folders)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, group: bool, backend: str
    ) -> Any:
        """Run one call, see ``run_ranks``. After a failure the pool is unusable."""
        self.calls += 1
        rendezvous = self.folder / f"rendezvous-{self.calls}"
        message = pickle.dumps(Call(function, args, group, backend, str(rendezvous), timeout))
        for worker in self.workers:
            _send(worker, message)
        watch = _Watch(self.workers, timeout)
        watch.follow()
        if len(watch.results) < len(self.workers):
            watch.collect_stacks()
            raise RanksFailed(watch.title(function.__name__, len(self.workers)), watch.failures, watch.signals)
        for worker in self.workers:
            _send(worker, RELEASE)
        rendezvous.unlink(missing_ok=True)
        return [pickle.loads(watch.results[rank]) for rank in range(len(self.workers))]  # noqa: S301 (own children)

    def close(self) -> None:
        """End all workers: those that wait for a call exit, the others are killed."""
        for worker in self.workers:
            _send(worker, STOP)
            worker.connection.close()
        for worker in self.workers:
            worker.process.join(1.0)
            worker.process.kill()
            worker.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Watch:
    """Follows one call to its end: results, failures, deaths, time-out."""

    def __init__(self, workers: list[Worker], timeout: float) -> None:
        self.workers = workers
        self.timeout = timeout
        self.pending = dict(enumerate(workers))
        self.results: dict[int, bytes] = {}
        self.failures: dict[int, str] = {}
        self.signals: dict[int, int] = {}
        self.timed_out = False

    def follow(self) -> None:
        """Return when every rank has reported or died, or when time is up."""
        deadline = time.monotonic() + self.timeout
        while self.pending:
            waited_for = [worker.connection for worker in self.pending.values()]
            waited_for += [worker.process.sentinel for worker in self.pending.values()]  # type: ignore[misc]
            if not wait(waited_for, max(0.0, deadline - time.monotonic())):
                self.timed_out = not self.failures
                return
            for rank, worker in list(self.pending.items()):
                self._take(rank, worker)
            if self.failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    def _take(self, rank: int, worker: Worker) -> None:
        if worker.connection.poll():
            try:
                report: Report = worker.connection.recv()
            except (EOFError, OSError):
                self._died(rank, worker)
                return
            del self.pending[rank]
            if report.result is None:
                self.failures[rank] = report.failure
            else:
                self.results[rank] = report.result
        elif not worker.process.is_alive():
            self._died(rank, worker)

    def _died(self, rank: int, worker: Worker) -> None:
        del self.pending[rank]
        worker.process.join()
        code = worker.process.exitcode or 0
        if code < 0:
            self.signals[rank] = -code
            cause = f"killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            cause = f"ended by itself with status {code}"
        self.failures[rank] = f"{cause}\n{worker.said()}"

    def collect_stacks(self) -> None:
        """Make every rank that is still busy write its stacks and exit."""
        for worker in self.pending.values():
            assert worker.process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(worker.process.pid, signal.SIGUSR1)
        for rank, worker in self.pending.items():
            worker.process.join(GRACE_SECONDS)
            stacks = worker.said() or "no stacks: the process did not answer SIGUSR1"
            self.failures[rank] = f"still running; its stacks:\n{stacks}"

    def title(self, name: str, world_size: int) -> str:
        """Return the first line of the error."""
        if self.timed_out:
            late = sorted(self.pending)
            return f"{name} on {world_size} ranks: ranks {late} did not finish in {self.timeout:g} seconds"
        return f"{name} on {world_size} ranks: failed on ranks {sorted(self.failures)}"


def _send(worker: Worker, message: bytes) -> None:
    with contextlib.suppress(OSError):  # a dead worker is reported by the watch
        worker.connection.send_bytes(message)


def _close_all() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()


_POOLS: dict[int, Pool] = {}
_STARTING = threading.Lock()
_TURNS: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # of the pool of a number of ranks
atexit.register(_close_all)
