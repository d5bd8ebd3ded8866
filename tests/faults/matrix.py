"""Every fault by real processes: ``python -m tests.faults.matrix`` prints the table of docs/reliability.md.

--kills N     random kills in one job (20)
--only TEXT   cases whose name has it
--table FILE  where the table goes besides
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megapar.core.checkpoint import folder as folders
from tests.faults.job import Ended, Fault, run_job

SHARDING = ("--sharding-degree", "2")
MP = ("--mp-degree", "2")
FOUR = ("--mp-degree", "2", "--sharding-degree", "2")
NONE = Fault("none", attempts=())
INTERVAL = 2


@dataclass
class Outcome:
    """Of one case. tried: faults. survived: of them those after which the run went on or was refused by name.

    lost_steps: of each. worst: largest relative difference of a loss to the uninterrupted run.
    """

    tried: int
    survived: int
    lost_steps: list[int] = field(default_factory=list)
    worst: float = 0.0
    seconds: list[float] = field(default_factory=list)
    note: str = ""


_WANTED: dict[tuple[int, tuple[str, ...]], dict[int, float]] = {}


def uninterrupted(world_size: int, *flags: str) -> dict[int, float]:
    """The losses of the run that nothing happens to."""
    key = (world_size, flags)
    if key not in _WANTED:
        with tempfile.TemporaryDirectory() as folder:
            ended = run_job(Path(folder), world_size, NONE, *flags)
            assert ended.status == 0, ended.output
            _WANTED[key] = ended.losses
    return _WANTED[key]


def compared(ended: Ended, want: dict[int, float], tolerance: float = 0.0) -> Outcome:
    """The outcome of a job that was to go on to the end."""
    same = ended.status == 0 and ended.losses.keys() == want.keys()
    worst = max((abs(ended.losses[i] - want[i]) / abs(want[i]) for i in want), default=0.0) if same else 1.0
    tried = max(1, len(ended.strikes))
    good = same and worst <= tolerance
    note = "" if good else ended.output[-2000:]
    return Outcome(tried, tried if good else 0, ended.lost_steps, worst, ended.seconds_to_next_step, note)


def died(kind: str, rank: int, world_size: int, *flags: str, iteration: int = 4) -> Callable[[Path], Outcome]:
    """A case in which a rank dies once and the launcher starts all of them again."""

    def case(folder: Path) -> Outcome:
        want = uninterrupted(world_size, *flags)
        return compared(run_job(folder, world_size, Fault(kind, rank, iteration), *flags, restarts=1), want)

    return case


def random_kills(count: int) -> Callable[[Path], Outcome]:
    """One long job, killed again and again at random moments."""

    def case(folder: Path) -> Outcome:
        flags = (*SHARDING, "--train-iters", "3000", "--lr-decay-iters", "3000", "--no-async-save")
        fault = Fault("kill at random", attempts=tuple(range(count)), seed=20, seconds=1.5)
        ended = run_job(folder, 2, fault, *flags, restarts=count + 2)
        return compared(ended, uninterrupted(2, *flags))

    return case


def stopped(kind: str) -> Callable[[Path], Outcome]:
    """A signal, after which the job saves, ends well and is started again by hand."""

    def case(folder: Path) -> Outcome:
        first = run_job(folder, 2, Fault(kind, 1, 3), *SHARDING)
        if first.status != 0 or max(first.losses) != 3:
            return Outcome(1, 0, note=first.output[-2000:])
        outcome = compared(run_job(folder, 2, NONE, *SHARDING), uninterrupted(2, *SHARDING))
        outcome.lost_steps = [0]
        return outcome

    return case


def still(folder: Path) -> Outcome:
    """SIGSTOP of one rank: the watchdog ends the step, the launcher starts all again."""
    ended = run_job(folder, 2, Fault("SIGSTOP", 1, 4), *SHARDING, "--step-timeout-seconds", "3", restarts=1)
    outcome = compared(ended, uninterrupted(2, *SHARDING))
    if "late: rank 1 does not answer" not in ended.output:
        outcome.survived, outcome.note = 0, "the late rank was not named"
    return outcome


def local(folder: Path) -> Outcome:
    """A kill with local checkpoints every step, and none on disk."""
    flags = (*SHARDING, "--local-checkpoint-interval", "1", "--save-interval", "0")
    flags = (*flags, "--local-checkpoint-dir", str(folder / "memory"), "--train-iters", "6")
    ended = run_job(folder, 2, Fault("kill in step", 1, 5), *flags, restarts=1)
    outcome = compared(ended, uninterrupted(2, *SHARDING))
    if "taking the local checkpoint" not in ended.output:
        outcome.survived, outcome.note = 0, "no local checkpoint was taken: " + ended.output[-1500:]
    return outcome


def moved(*flags: str) -> Callable[[Path], Outcome]:
    """Killed on one layout, continued by hand on another."""

    def case(folder: Path) -> Outcome:
        first = run_job(folder, 2, Fault("kill in step", 0, 4), *SHARDING)
        if first.status == 0:
            return Outcome(1, 0, note="the job went on")
        world_size = 4 if flags == FOUR else 2 if flags else 1
        outcome = compared(run_job(folder, world_size, NONE, *flags), uninterrupted(2, *SHARDING), 1e-10)
        outcome.lost_steps = [1]
        return outcome

    return case


def damaged(harm: Callable[[Path, Path], None]) -> Callable[[Path], Outcome]:
    """A finished run's newest checkpoint is damaged: the one before it is taken and the steps are done again.

    harm: gets the root and the newest checkpoint.
    """

    def case(folder: Path) -> Outcome:
        want = uninterrupted(1)
        run_job(folder, 1, NONE)
        root = folder / "c"
        harm(root, folders.iteration_folder(root, 6))
        ended = run_job(folder, 1, NONE)
        outcome = compared(ended, want)
        outcome.lost_steps = [6 - (ended.starts[1]["first"] - 1)] if len(ended.starts) > 1 else [0]
        if "WARNING" not in ended.output:
            outcome.survived, outcome.note = 0, "nothing was told: " + ended.output[-1000:]
        return outcome

    return case


def flip(path: Path) -> None:
    """One bit at a random place of the file."""
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1 << random.Random(path.name).randrange(8)
    path.write_bytes(content)


def cut(path: Path) -> None:
    """A truncation at a random place."""
    os.truncate(path, random.Random(path.name).randrange(path.stat().st_size))


def a_shard(newest: Path) -> Path:
    """The file of tensors."""
    return next(newest.glob("shard-*"))


def refused(status: int, told: str, *flags: str, world_size: int = 2) -> Callable[[Path], Outcome]:
    """A run that must not start, with a named error and nothing changed."""

    def case(folder: Path) -> Outcome:
        ended = run_job(folder, world_size, NONE, *flags)
        good = ended.status == status and told in ended.output and not ended.losses
        return Outcome(1, int(good), note="" if good else ended.output[-2000:])

    return case


def bad_index(folder: Path) -> Outcome:
    """A truncated .idx beside sound data."""
    folder.mkdir(parents=True)
    text = folder / "text.jsonl"
    text.write_text("".join(f'{{"text": "one two three four five six seven {i}"}}\n' for i in range(200)))
    prefix = folder / "data"
    line = [sys.executable, "-m", "megapar.tools.main", "data", "prepare", str(text), "--output", str(prefix)]
    made = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    index = next(iter(folder.glob("*.idx")), None)
    if index is None:
        return Outcome(1, 0, note=made.stderr[-1500:])
    cut(index)
    ended = run_job(folder, 1, NONE, "--data-path", str(index.with_suffix("")))
    good = ended.status != 0 and "DataError" in ended.output and "Traceback" not in ended.output
    return Outcome(1, int(good), note="" if good else ended.output[-2000:])


def full_disk(folder: Path) -> Outcome:
    """A tmpfs with room for one checkpoint: the second is not written, training goes on, the first stays sound."""
    root = folder / "c"
    root.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(root)], capture_output=True).returncode:
        return Outcome(0, 0, note="no right to mount a tmpfs here")
    try:
        ended = run_job(folder, 1, NONE, "--exit-interval", "5")
        kept = folders.checkpoints(root)
        told = "was not saved" in ended.output or "CheckpointError" in ended.output
        sound = run_job(
            folder, 1, NONE, "--exit-interval", "3", "--save-interval", "0", "--save", str(folder / "other")
        )
        want = uninterrupted(1)
        same = all(want[i] == loss for i, loss in ended.losses.items())
        good = told and len(ended.losses) == 5 and same and bool(kept) and "resumed at" in sound.output
        return Outcome(1, int(good), [0], note="" if good else ended.output[-1500:] + sound.output[-500:])
    finally:
        subprocess.run(["umount", str(root)], check=False)


def read_only(folder: Path) -> Outcome:
    """A target that takes no file: every save fails and is told, training goes on to the last one."""
    ended = run_job(folder, 1, NONE, "--save", "/sys/megapar", "--load", str(folder / "none"), "--finetune")
    ended = run_job(folder, 1, NONE, "--save", "/sys/megapar", "--load", "/sys/megapar")
    good = ended.losses == uninterrupted(1) and ended.status == 1 and "was not saved" in ended.output
    return Outcome(1, int(good), [0], note="" if good else ended.output[-2000:])


def cases(kills: int) -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    for layout, flags in (("sharding 2", SHARDING), ("mp 2", MP), ("stage 3", (*SHARDING, "--sharding-stage", "3"))):
        yield f"kill -9 in a step, {layout}", died("kill in step", 1, 2, *flags)
    yield "kill -9 in a step, 4 ranks", died("kill in step", 3, 4, *FOUR)
    for phase, rank in (("shard", 1), ("shard", 0), ("scalars", 0), ("manifest", 0)):
        yield f"kill -9 in a save: {phase}, rank {rank}", died(f"kill in {phase}", rank, 2, *SHARDING)
    yield "kill -9 in a save: after the rename", died("kill after rename", 0, 2, *SHARDING)
    yield "kill -9 in a save: latest", died("kill in latest", 0, 2, *SHARDING)
    yield "kill -9 at random moments", random_kills(kills)
    yield "kill -9 with local checkpoints only", local
    yield "SIGTERM", stopped("SIGTERM")
    yield "SIGUSR1", stopped("SIGUSR1")
    yield "SIGSTOP", still
    yield "killed, continued on mp 2", moved(*MP)
    yield "killed, continued on one process", moved()
    yield "killed, continued on 4 ranks, mp 2 x sharding 2", moved(*FOUR)
    for name, harm in (("bit flip", flip), ("truncation", cut)):
        yield f"{name} in a shard", damaged(lambda root, newest, harm=harm: harm(a_shard(newest)))
        for file in ("layout.json", "scalars.json"):
            yield f"{name} in {file}", damaged(lambda root, newest, harm=harm, file=file: harm(newest / file))
    yield "latest is empty", damaged(lambda root, newest: _lost(root, newest, ""))
    yield "latest is garbage", damaged(lambda root, newest: _lost(root, newest, "\0\1garbage"))
    yield "latest names a missing folder", damaged(lambda root, newest: shutil.rmtree(newest))
    yield "disk full on a small tmpfs", full_disk
    yield "read-only target", read_only
    yield "wrong world size", refused(1, "world-size", "--sharding-degree", "3")
    yield "corrupt .idx", bad_index


def _lost(root: Path, newest: Path, latest: str) -> None:
    shutil.rmtree(newest)
    (root / "latest").write_text(latest)


def row(name: str, outcome: Outcome) -> str:
    """A line of the table."""
    lost = max(outcome.lost_steps, default=0)
    return f"| {name} | {outcome.tried} | {outcome.survived} | {lost} | {outcome.worst:.1g} |"


def main() -> int:
    """Run what is asked for; 1 where a fault was not survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", default="")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    rows = ["| fault | tried | survived | most lost steps | largest loss error |", "|---|---|---|---|---|"]
    everything: list[Outcome] = []
    with tempfile.TemporaryDirectory() as root:
        for number, (name, case) in enumerate(cases(options.kills)):
            if options.only in name:
                start = time.monotonic()
                outcome = case(Path(root) / str(number))
                everything.append(outcome)
                rows.append(row(name, outcome))
                print(f"{rows[-1]} {time.monotonic() - start:.0f} s", flush=True)
                if outcome.survived < outcome.tried or outcome.note:
                    print(outcome.note, flush=True)
    seconds = [second for outcome in everything for second in outcome.seconds]
    tried, survived = sum(o.tried for o in everything), sum(o.survived for o in everything)
    rows.append(f"| **all** | {tried} | {survived} | {max(max(o.lost_steps, default=0) for o in everything)} | |")
    text = "\n".join(rows)
    if seconds:
        text += (
            f"\n\nFrom a fault to the next step: median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s."
        )
    print(text)
    if options.table:
        options.table.write_text(text + "\n")
    return 0 if survived == tried else 1


if __name__ == "__main__":
    sys.exit(main())
