"""What watches a run: logs that cannot be written, sections that hang, saves and restarts that fail again and again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import ROOT, Ended, Fault, _ended, _environ, flags_of, run_job
from tests.faults.outcome import NONE, SHARDING, Outcome, compared, told, uninterrupted, verdict

PATIENCE_SECONDS = 120
NO_RIGHT = Outcome(0, 0, note="no right to mount a file system here")


def make_ext4(image: Path) -> None:
    """A file system of 32 MiB in a file; where it cannot be made, it cannot be mounted either."""
    with image.open("wb") as file:
        file.truncate(32 << 20)
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=False, capture_output=True)


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[bool]:
    """A file system of one's own at the folder; whether there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def tiny(folder: Path) -> contextlib.AbstractContextManager[bool]:
    """With room for a few lines only."""
    return mounted(folder, "-t", "tmpfs", "-o", "size=8k", "tmpfs")


def fill(disk: Path) -> None:
    """Leave no room on it."""
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(bytes(8 << 10))


def full_log(*flags: str, said: str) -> Callable[[Path], Outcome]:
    """Records go to a disk that is full. ``{disk}`` in a flag is its folder."""

    def case(folder: Path) -> Outcome:
        disk = folder / "disk"
        with tiny(disk) as there:
            if not there:
                return NO_RIGHT
            fill(disk)
            ended = run_job(folder, 1, NONE, *(flag.replace("{disk}", str(disk)) for flag in flags))
        good = ended.status == 0 and said.replace("{disk}", str(disk)) in ended.output
        good = good and (folder / "c" / "iter_0000006").is_dir()
        return verdict(good, ended)

    return case


def output_to_a_full_disk(folder: Path) -> Outcome:
    """Standard output and error are a file there."""
    disk = folder / "disk"
    with tiny(disk) as there:
        if not there:
            return NO_RIGHT
        fill(disk)
        with (disk / "log").open("wb") as log:
            ended = started(folder, 2, NONE, *SHARDING, stdout=log)
        outcome = compared(ended(), uninterrupted(2, *SHARDING))
    outcome.lost_steps = [0]
    return outcome


def reader_gone(folder: Path) -> Outcome:
    """Whoever reads standard output and error goes away after a line, as ``| head -1`` does."""
    reader, writer = os.pipe()
    with open(writer, "wb") as out:
        ended = started(folder, 2, NONE, *SHARDING, stdout=out)
    with open(reader, "rb") as read:
        read.readline()
    outcome = compared(ended(), uninterrupted(2, *SHARDING))
    outcome.lost_steps = [0]
    return outcome


def started(folder: Path, world_size: int, fault: Fault, *flags: str, stdout: object) -> Callable[[], Ended]:
    """A job whose output goes elsewhere; what waits for its end."""
    folder.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", str(world_size)]
    line += ["--stop-timeout", "2", "tests/faults/faulty.py", *flags_of(folder, *flags)]
    job = subprocess.Popen(line, env=_environ(folder, fault), cwd=ROOT, stdout=stdout, stderr=stdout)  # type: ignore[call-overload]

    def wait() -> Ended:
        try:
            status = job.wait(PATIENCE_SECONDS)
        finally:
            job.kill()
            job.wait()
        return _ended(folder, status, "")

    return wait


def frozen(world_size: int, fault: Fault, *said: str) -> Callable[[Path], Outcome]:
    """The disk of the checkpoints answers no more in a save (as a file server that is gone): the job ends by itself and
    says where it stood and which process cannot be ended; when the disk answers again, the next start goes on.
    """

    def case(folder: Path) -> Outcome:
        folder.mkdir(parents=True)
        image, disk = folder / "image", folder / "disk"
        make_ext4(image)
        layout = SHARDING if world_size == 2 else ()
        where = ("--save", str(disk / "c"), "--load", str(disk / "c"))
        flags = (*layout, *where, "--section-timeouts", "save=4")
        with mounted(disk, "-o", "loop", str(image)) as there, (folder / "log").open("wb") as log:
            if not there:
                return NO_RIGHT
            try:
                begun = time.monotonic()
                first = started(folder, world_size, fault, *flags, stdout=log)()
                seconds = time.monotonic() - begun
            finally:
                subprocess.run(["fsfreeze", "-u", str(disk)], check=False, capture_output=True)
            output = (folder / "log").read_text()
            missing = [text for text in said if text not in output]
            if first.status != 1 or missing:
                return Outcome(1, 0, note=f"{first.status} after {seconds:.0f} s, {missing}: {output[-3000:]}")
            outcome = compared(run_job(folder, world_size, NONE, *flags), uninterrupted(world_size, *layout))
        return outcome

    return case


def stands_still(fault: Fault, section: str, *flags: str) -> Callable[[Path], Outcome]:
    """SIGSTOP of a rank outside of a step: the section ends the run, which is started again."""

    def case(folder: Path) -> Outcome:
        limits = ("--section-timeouts", f"{section}=3")
        ended = run_job(folder, 2, fault, *SHARDING, *flags, *limits, restarts=1)
        said = (f"megapar watchdog: {section} ", "late: rank 1 does not answer", f"waiting: ranks 0 in {section} ")
        return told(compared(ended, uninterrupted(2, *SHARDING, *flags)), ended, *said)

    return case


def fails_to_evaluate(*flags: str) -> Callable[[Path], Outcome]:
    """One rank raises in the evaluation of a step that is saved: the restart goes on after this step."""

    def case(folder: Path) -> Outcome:
        ended = run_job(folder, 2, Fault("bug in evaluation", 1, 2), *SHARDING, *flags, restarts=1)
        outcome = compared(ended, uninterrupted(2, *SHARDING))
        if outcome.survived and ended.lost_steps != [0]:
            outcome.survived, outcome.note = 0, f"the step was lost: {ended.output[-2500:]}"
        return outcome

    return case


def killed_at_every_start(folder: Path) -> Outcome:
    """A signal is never the same failure: all restarts are used."""
    fault = Fault("kill in step", 1, 1, attempts=(0, 1, 2))
    ended = run_job(folder, 2, fault, *SHARDING, restarts=3)
    return compared(ended, uninterrupted(2, *SHARDING))


def fails_at_every_start(kind: str, said: str, offered: bool) -> Callable[[Path], Outcome]:
    """The same exception at the same step: the second one is the last."""

    def case(folder: Path) -> Outcome:
        fault = Fault(kind, 1, 4, attempts=(0, 1, 2, 3, 4))
        ended = run_job(folder, 2, fault, *SHARDING, restarts=4)
        once = ended.output.count("with no checkpoint in between; the job is not restarted") == 1
        good = ended.status == 1 and said in ended.output and once and len(ended.strikes) <= 3
        good = good and ("add --skip-samples 24-31 to the same command" in ended.output) is offered
        return Outcome(1, int(good), [0], note="" if good else f"{len(ended.strikes)} {ended.output[-2500:]}")

    return case


def saves_fail(folder: Path) -> Outcome:
    """Nothing is written until the last save: each failure is told more plainly, and the run ends well."""
    ended = run_job(folder, 1, Fault("no memory for copies"), "--train-iters", "8")
    good = ended.status == 0 and (folder / "c" / "iter_0000008").is_dir() and len(ended.losses) == 8
    said = ("iter_0000002 was not saved: ", "the 2nd checkpoint in a row", "ERROR: iter_0000006 was not saved, the 3rd")
    return told(verdict(good, ended), ended, *said)


def unremovable(folder: Path) -> Outcome:
    """An old checkpoint that cannot be removed is told as that, and the run ends well."""
    ended = run_job(folder, 1, Fault("no removal"), "--keep", "1")
    good = ended.status == 0 and (folder / "c" / "latest").read_text().split()[0] == "iter_0000006"
    good = good and "was not saved" not in ended.output
    return told(verdict(good, ended), ended, "an older checkpoint could not be removed")


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    metrics = ("--metrics-jsonl", "{disk}/metrics.jsonl")
    yield "disk of logs full, metrics", full_log(*metrics, said="WARNING: {disk}/metrics.jsonl cannot be written")
    board = ("--tensorboard-dir", "{disk}/board")
    yield "disk of logs full, TensorBoard", full_log(*board, said="WARNING: {disk}/board cannot be written")
    yield "disk of logs full, standard output", output_to_a_full_disk
    yield "reader of the output gone", reader_gone
    one = ("megapar watchdog: save of iteration 4 has taken", "; file ", "process", "cannot be ended")
    yield "save hangs in the kernel, 1 rank", frozen(1, Fault("freeze", 0, 4), *one)
    both = ("late: rank 1 in save of iteration 4", "shard-00001.safetensors", "of rank 1 cannot be ended")
    yield "save hangs in the kernel, 2 ranks", frozen(2, Fault("freeze", 1, 4), *both)
    evaluation = ("--eval-interval", "2", "--eval-iters", "1")
    yield "SIGSTOP in an evaluation", stands_still(Fault("SIGSTOP in evaluation", 1, 2), "evaluation", *evaluation)
    yield "an evaluation raises", fails_to_evaluate(*evaluation)
    yield "an evaluation raises, no async save", fails_to_evaluate(*evaluation, "--no-async-save")
    yield "SIGSTOP in a save", stands_still(Fault("SIGSTOP in shard", 1, 4), "save")
    yield "kill -9 at every start", killed_at_every_start
    yield "the same failure at every start, data", fails_at_every_start("bad data", "DataError at step 4 again", True)
    bug = fails_at_every_start("bug", "ValueError at step 4 again", False)
    yield "the same failure at every start, a bug", bug
    yield "saves fail in a row", saves_fail
    yield "old checkpoint cannot be removed", unremovable
