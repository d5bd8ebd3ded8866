"""Two runs and one folder: who owns --save, who follows whom, and what a writer that slept may still do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megapar.checkpoints.format.names import read_latest
from megapar.health.stop.process import Process
from tests.faults.job import PATIENCE_SECONDS, PATIENT, ROOT, Ended, Fault, _ended, _environ, flags_of, run_job
from tests.faults.outcome import NONE, SHARDING, Outcome, compared, uninterrupted, verdict

LAUNCH = (sys.executable, "-m", "megapar.tools.main", "launch", "--stop-timeout", "2")
LONG = ("--train-iters", "80", "--lr-decay-iters", "80")
ALIVE = "belongs to another run, which is alive"
ANOTHERS = "contains checkpoints of another run"


class Begun:
    """A job that goes on while others are started. Its losses go into a folder of its own, its output to a file."""

    def __init__(
        self,
        folder: Path,
        save: Path,
        flags: Sequence[str],
        fault: Fault = NONE,
        line: Sequence[str] = LAUNCH,
        *,
        load: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._log = (folder / "log").open("w+")
        arguments = flags_of(folder, "--save", str(save), "--load", str(save), *flags)
        while not load and "--load" in arguments:
            at = arguments.index("--load")
            del arguments[at : at + 2]
        self.process = subprocess.Popen(
            [*line, "tests/faults/faulty.py", *arguments],
            env=_environ(folder, fault),
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
        )

    def until(self, there: Callable[[], bool]) -> None:
        """Wait for something that the job does."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not there() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert there(), self.output

    def until_it_steps(self) -> None:
        """Wait for its first step."""
        self.until((self.folder / "strikes.jsonl.starts").exists)

    @property
    def output(self) -> str:
        """What it has said so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def end(self) -> Ended:
        """Wait for its end."""
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
        return _ended(self.folder, self.process.returncode, self.output)


def owner_of(save: Path) -> Process:
    """The process that owns a folder."""
    epoch = max(int(path.stem) for path in (save / "owner").glob("*.json"))
    return Process.from_json(json.loads((save / "owner" / f"{epoch}.json").read_text())["process"])


def at_once(folder: Path) -> Outcome:
    """Two fresh runs: one is refused by name, the other one's checkpoints are all its own."""
    runs = [Begun(folder / name, folder / "c", LONG, load=False) for name in ("a", "b")]
    ended = sorted((run.end() for run in runs), key=lambda one: one.status)
    first, second = ended
    refused = second.status == 2 and (ALIVE in second.output or ANOTHERS in second.output) and not second.losses
    alone = sorted(path.name for path in (folder / "c").glob("iter_*")) == [f"iter_{n:07d}" for n in range(2, 81, 2)]
    want = uninterrupted(1, *LONG)
    return verdict(first.status == 0 and first.losses == want and refused and alone, *ended)


def launcher_killed(folder: Path) -> Outcome:
    """kill -9 of the launcher alone and the same command: refused while its rank lives, then it goes on."""
    first = Begun(folder, folder / "c", LONG)
    first.until_it_steps()
    owner = owner_of(folder / "c")
    first.process.kill()
    again = run_job(folder, 1, NONE, *LONG)
    if again.status == 2 and ALIVE in again.output:
        first.process.wait()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while owner.lives() and time.monotonic() < deadline:
            time.sleep(0.1)
        again = run_job(folder, 1, NONE, *LONG)
    first.end()
    return verdict(again.status == 0 and again.losses == uninterrupted(1, *LONG), again)


def killed(change: Callable[[Path], object], waits: bool) -> Callable[[Path], Outcome]:
    """kill -9 of launcher and rank, and the same command at once. change: of the folder between the two."""

    def case(folder: Path) -> Outcome:
        first = Begun(folder, folder / "c", LONG)
        first.until_it_steps()
        first.process.kill()
        os.kill(owner_of(folder / "c").pid, signal.SIGKILL)
        first.end()
        change(folder / "c")
        again = run_job(folder, 1, NONE, *LONG)
        told = ("waiting up to 60 s to see whether the owner" in again.output) is waits
        return verdict(again.status == 0 and again.losses == uninterrupted(1, *LONG) and told, again)

    return case


def elsewhere(save: Path) -> None:
    """The owner was on another machine, of which nothing is to be seen."""
    for path in (save / "owner").glob("*.json"):
        note = json.loads(path.read_text())
        note["process"] |= {"host": "another", "boot": "another"}
        path.write_text(json.dumps(note))


def slept(folder: Path) -> Outcome:
    """SIGSTOP between an owner's last look and its rename; another run takes over and ends; then it wakes up."""
    first = Begun(folder / "a", folder / "c", LONG, Fault("SIGSTOP in rename", 0, 4))
    first.until((folder / "a" / "strikes.jsonl").exists)
    sleeper = owner_of(folder / "c").pid
    try:
        second = Begun(folder / "b", folder / "c", LONG).end()
    finally:
        os.kill(sleeper, signal.SIGCONT)
    late = first.end()
    # It went on from 2 with steps that it has in its own metrics file.
    want = {i: loss for i, loss in uninterrupted(1, *LONG).items() if i > 2}
    good = second.status == 0 and second.losses == want and read_latest(folder / "c") == ("iter_0000080", 2)
    good = good and late.status == 1 and "FolderLostError" in late.output and "has another owner by now" in late.output
    left = [path.name for path in (folder / "c").glob("*.tmp-*")]
    return verdict(good and not left, second, late)


def nameless(folder: Path) -> Outcome:
    """Two jobs of several nodes that were given no name, one after the other: the second is refused."""

    def job(name: str, *flags: str) -> Ended:
        meet = ("--rdzv-conf", f"store_type=file,{PATIENT}", "--rdzv-endpoint", str(folder / f"{name}.meet"))
        line = (*LAUNCH, "--nnodes", "1:2", "--local-addr", "127.0.0.1", *meet)
        return Begun(folder / name, folder / "c", flags, line=line, load=False).end()

    first, second = job("a"), job("b", "--seed", "2")
    refused = second.status == 2 and ANOTHERS in second.output and not second.losses
    return verdict(first.status == 0 and refused, first, second)


APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def containers(folder: Path) -> Outcome:
    """Two jobs in PID namespaces of their own with one memory: the living one's local checkpoints stay."""
    memory = ("--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(folder / "memory"))
    flags = (*SHARDING, *memory, "--save-interval", "0")
    long = ("--train-iters", "150", "--lr-decay-iters", "150")
    line = (*APART, *LAUNCH, "--nproc-per-node", "2", "--max-restarts", "1")
    first = Begun(folder / "a", folder / "a" / "c", (*flags, *long), Fault("kill in step", 1, 140), line)
    first.until_it_steps()
    second = Begun(folder / "b", folder / "b" / "c", flags, line=(*APART, *LAUNCH, "--nproc-per-node", "2")).end()
    ended = first.end()
    outcome = compared(ended, uninterrupted(2, *SHARDING, *long))
    if second.status or "taking the local checkpoint" not in ended.output:
        outcome.survived, outcome.note = 0, second.output[-2000:] + ended.output[-2000:]
    return outcome


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    yield "two fresh runs with one --save", at_once
    yield "two jobs of several nodes without names with one --save", nameless
    yield "kill -9 of the launcher alone and the same command again", launcher_killed
    yield "kill -9 of launcher and rank and the same command at once", killed(lambda save: None, waits=False)
    yield "an owner that nobody can see, another machine's", killed(elsewhere, waits=True)
    yield "an owner that nobody can see, without its notes", killed(lambda save: shutil.rmtree(save / "owner"), False)
    yield "SIGSTOP between an owner's last look and its rename", slept
    if shutil.which("unshare") and not subprocess.run([*APART, "true"], capture_output=True, check=False).returncode:
        yield "two containers with one memory for local checkpoints", containers
