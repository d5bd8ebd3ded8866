"""Signals to launchers and ranks, launchers that are killed, nodes that do not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.job import PATIENCE_SECONDS, ROOT, Ended, Fault, run_job, run_line
from tests.faults.outcome import NONE, SHARDING, Outcome, compared, uninterrupted
from tests.support.process import started

PATIENT = ("--stop-timeout", "120")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
GONE_SECONDS = 5.0


def goes_on(folder: Path, first: Ended, good: bool) -> Outcome:
    """What came of a job that ended early as it should, and of the same command after it."""
    if not good:
        return Outcome(max(1, len(first.strikes)), 0, note=f"status {first.status}: {first.output[-3000:]}")
    return compared(run_job(folder, 2, NONE, *SHARDING), uninterrupted(2, *SHARDING))


def saves(fault: Fault) -> Callable[[Path], Outcome]:
    """Signals after which the job saves, ends well and is started again by hand."""

    def case(folder: Path) -> Outcome:
        first = run_job(folder, 2, fault, *SHARDING, launcher=PATIENT)
        saved = "asked to stop by a signal; saved" in first.output and max(first.losses) < 6
        return goes_on(folder, first, first.status == 0 and saved)

    return case


def nohup(folder: Path) -> Outcome:
    """SIGHUP to a job that was started to ignore it: nothing happens."""
    fault = Fault("signal to the job", 1, 3, name="SIGHUP", harm="launcher first")
    ended = run_job(folder, 2, fault, *SHARDING, ignored=[signal.SIGHUP])
    outcome = compared(ended, uninterrupted(2, *SHARDING))
    outcome.lost_steps, outcome.seconds = [0], []
    return outcome


def insists(folder: Path) -> Outcome:
    """A second SIGINT in a save that takes long: all end at once, and the checkpoint before it is taken."""
    fault = Fault("two signals around a slow save", 0, 4, seconds=6.0, name="SIGINT SIGINT")
    begun = time.time()
    first = run_job(folder, 2, fault, *SHARDING, launcher=PATIENT)
    at = first.strikes[-1]["at"] if len(first.strikes) == 2 else begun
    quick = first.status == 1 and time.time() - at < GONE_SECONDS and "SIGINT again" in first.output
    return goes_on(folder, first, quick)


def stuck(name: str) -> Callable[[Path], Outcome]:
    """One rank stands still and the other waits for it in C code: both end by the time-out, told where they stood."""

    def case(folder: Path) -> Outcome:
        fault = Fault("SIGSTOP and signal", 1, 4, name=name)
        first = run_job(folder, 2, fault, *SHARDING, launcher=("--stop-timeout", "3"))
        told = "rank 0: asked to stop by SIGTERM 2.7 s ago (--stop-timeout), and stuck since" in first.output
        return goes_on(folder, first, first.status == 1 and told)

    return case


def launcher_killed(line: Sequence[str]) -> Callable[[Path], Outcome]:
    """kill -9 of the launcher alone: its ranks are gone within seconds, and the same command goes on."""

    def case(folder: Path) -> Outcome:
        first = run_line(folder, line, Fault("kill launcher", 1, 4), *SHARDING)
        seconds = time.time() - first.strikes[0]["at"] if first.strikes else GONE_SECONDS
        gone = seconds < GONE_SECONDS and max(first.losses) <= 4
        return goes_on(folder, first, first.status == -signal.SIGKILL and gone)

    return case


def nobody_comes(name: str) -> Callable[[Path], Outcome]:
    """A signal while the second node is waited for: the launcher ends at once and says so."""

    def case(folder: Path) -> Outcome:
        line = [*started(), sys.executable, "-u", "-m", "megapar.tools.main", "launch", "--nnodes", "2"]
        line += ["--rdzv-endpoint", "localhost:0", "pretrain_moe.py", "--train-iters", "1", "--sharding-degree", "2"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        with tempfile.TemporaryFile("w+") as said:
            job = subprocess.Popen(line, cwd=ROOT, env=environ, stdout=said, stderr=said)
            try:
                deadline, output = time.monotonic() + PATIENCE_SECONDS, ""
                while "waiting for nodes: 1 of 2" not in output and time.monotonic() < deadline and job.poll() is None:
                    time.sleep(0.1)
                    output = _all(said.fileno())
                job.send_signal(signal.Signals[name])
                begun = time.monotonic()
                status = job.wait(GONE_SECONDS)
            except subprocess.TimeoutExpired:
                status = 0
            finally:
                job.kill()
                job.wait()
            output = _all(said.fileno())
        told = f"{name} while waiting for nodes; exiting" in output and "Traceback" not in output
        good = status == 1 and told and time.monotonic() - begun < GONE_SECONDS
        return Outcome(1, int(good), [0], note="" if good else f"status {status}: {output[-2000:]}")

    return case


def _all(file: int) -> str:
    return os.pread(file, 1 << 20, 0).decode()


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    for name in ("SIGTERM", "SIGINT"):
        for order in ("launcher first", "ranks first", "between"):
            fault = Fault("signal to the job", 1, 3, name=name, harm=order)
            yield f"a signal to launcher and ranks at once, {name}, {order}", saves(fault)
    for name in ("SIGUSR1", "SIGHUP", "SIGQUIT", "SIGINT"):
        yield f"a signal to the launcher, {name}", saves(Fault("signal to the job", 1, 3, name=name, harm="launcher"))
    slow = Fault("two signals around a slow save", 0, 4, seconds=20.0, name="SIGUSR1 SIGTERM")
    yield "SIGUSR1 and 20 s later SIGTERM in a save of 30 s", saves(slow)
    yield "a second SIGINT in a save of 30 s", insists
    yield "SIGHUP under nohup", nohup
    for name in ("SIGTERM", "SIGUSR1"):
        yield f"a signal to a job that is stuck in C, {name}", stuck(name)
    launch = (*started(), sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", "2")
    yield "kill -9 of the launcher", launcher_killed(launch)
    yield "kill -9 of the launcher, torchrun", launcher_killed(TORCHRUN)
    for name in ("SIGTERM", "SIGINT"):
        yield f"a signal while nodes are waited for, {name}", nobody_comes(name)
