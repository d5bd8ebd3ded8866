"""Deaths, signals and damaged files around checkpoints; full disks, bad numbers, replicas that differ."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.job import ROOT, Fault, run_job, run_nodes
from tests.faults.outcome import DP, FOUR, MP, NONE, SHARDING, Outcome, compared, told, uninterrupted, verdict
from tests.support.damage import flip_bit


def died(kind: str, rank: int, world_size: int, *flags: str, iteration: int = 4) -> Callable[[Path], Outcome]:
    """A case in which a rank dies once and the launcher starts all of them again."""

    def case(folder: Path) -> Outcome:
        want = uninterrupted(world_size, *flags)
        return compared(run_job(folder, world_size, Fault(kind, rank, iteration), *flags, restarts=1), want)

    return case


def random_kills(kind: str, count: int, seconds: float, seed: int) -> Callable[[Path], Outcome]:
    """One long job, killed again and again; moments are drawn from so many seconds."""

    def case(folder: Path) -> Outcome:
        steps = str(40 + 25 * count)
        flags = (*SHARDING, "--train-iters", steps, "--lr-decay-iters", steps)
        fault = Fault(kind, attempts=tuple(range(count)), seed=seed, seconds=seconds)
        ended = run_job(folder, 2, fault, *flags, restarts=count + 2)
        outcome = compared(ended, uninterrupted(2, *flags))
        if len(ended.strikes) < count:
            outcome.note += f"the job ended after {len(ended.strikes)} of {count} kills"
        phases = [strike["what"] for strike in ended.strikes if strike["what"]]
        if phases:
            print("  kills by phase:", dict(sorted(Counter(phases).items())), flush=True)
        return outcome

    return case


def node_lost(another: bool) -> Callable[[Path], Outcome]:
    """One of two nodes of two ranks is killed in a step; another comes, or the run goes on without."""

    def case(folder: Path) -> Outcome:
        flags = ("--mp-degree", "2", "--sharding-degree", "-1")
        ended = run_nodes(folder, 2, 4, *flags, another=another)
        outcome = compared(ended, uninterrupted(4, *flags), 0.0 if another else 1e-10)
        if max(ended.lost_steps, default=3) > 2 or ("launch: 2 of 4 ranks are present" in ended.output) is another:
            outcome.survived, outcome.note = (
                0,
                f"{ended.lost_steps} lost, or the layout not told: {ended.output[-2000:]}",
            )
        told(outcome, ended, "on 1 nodes: 2 of 4 ranks are present: sharding 2 -> 1; the global batch is unchanged")
        return outcome

    return case


def bad_once(folder: Path) -> Outcome:
    """NaN on one rank that does not come again: the step is run again, and its second result is right."""
    ended = run_job(folder, 2, Fault("NaN once", 1, 4), *SHARDING)
    outcome = compared(ended, uninterrupted(2, *SHARDING))
    outcome.lost_steps = [0]
    return told(outcome, ended, "a rank computed wrongly")


def bad_for_good(folder: Path) -> Outcome:
    """NaN on one rank in every step: nothing of it is applied, and the run ends with module, rank and samples."""
    ended = run_job(folder, 2, Fault("NaN always", 1, 4), *SHARDING, "--bad-step-limit", "1")
    told = "first bad: the output of layers.1.mlp_norm on rank 1; samples 32-39"
    want = {i: loss for i, loss in uninterrupted(2, *SHARDING).items() if i <= 3}
    same = {i: ended.losses.get(i) for i in want} == want
    noted = (folder / "c" / "bad-batch-0000005.json").exists()
    good = ended.status == 1 and told in ended.output and same and noted
    return verdict(good, ended)


def diverged(layout: Sequence[str]) -> Callable[[Path], Outcome]:
    """One element of a replica changes: the guard names parameter and rank, and a restart goes on from before it."""

    def case(folder: Path) -> Outcome:
        flags = (*layout, "--replica-check-interval", "1")
        ended = run_job(folder, 2, Fault("divergence", 1, 3), *flags, restarts=1)
        return told(compared(ended, uninterrupted(2, *layout)), ended, "iteration 3: replicas of parameters differ: ")

    return case


def stopped(kind: str) -> Callable[[Path], Outcome]:
    """A signal, after which the job saves, ends well and is started again by hand."""

    def case(folder: Path) -> Outcome:
        first = run_job(folder, 2, Fault(kind, 1, 3), *SHARDING)
        said = ("stopped at iteration 3: asked to stop by a signal; saved", "to continue, run the same command again")
        ended = told(verdict(first.status == 0 and max(first.losses) == 3, first), first, *said)
        if not ended.survived:
            return ended
        outcome = compared(run_job(folder, 2, NONE, *SHARDING), uninterrupted(2, *SHARDING))
        outcome.lost_steps = [0]
        return outcome

    return case


def still(folder: Path) -> Outcome:
    """SIGSTOP of one rank: the watchdog ends the step, the launcher starts all again."""
    ended = run_job(folder, 2, Fault("SIGSTOP", 1, 4), *SHARDING, "--step-timeout-seconds", "3", restarts=1)
    said = ("late: rank 1 does not answer", "step 4 has taken")
    return told(compared(ended, uninterrupted(2, *SHARDING)), ended, *said)


def local(kind: str = "kill in step") -> Callable[[Path], Outcome]:
    """A kill with local checkpoints every step, and none on disk."""

    def case(folder: Path) -> Outcome:
        flags = (*SHARDING, "--local-checkpoint-interval", "1", "--save-interval", "0")
        flags = (*flags, "--local-checkpoint-dir", str(folder / "memory"))
        ended = run_job(folder, 2, Fault(kind, 1, 5), *flags, restarts=1)
        return told(compared(ended, uninterrupted(2, *SHARDING)), ended, "taking the local checkpoint")

    return case


def beside_others(folder: Path) -> Outcome:
    """Local checkpoints of a job named '..': files around its folder, and what looks like a job but is none, stay."""
    root = folder / "memory" / "jobs"
    others = (folder / "memory" / "precious", root / "thesis" / "owner-manual.txt", root / "other" / "data.bin")
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    flags = (*SHARDING, "--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(root), "--save-interval", "0")
    ended = run_job(folder, 2, Fault("kill in step", 1, 5), *flags, restarts=1, launcher=("--rdzv-id", ".."))
    outcome = compared(ended, uninterrupted(2, *SHARDING))
    left = sorted(path.name for path in root.iterdir())
    if "taking the local checkpoint" not in ended.output or not all(map(Path.exists, others)) or len(left) > 2:
        outcome.survived, outcome.note = 0, f"{left} are left: {ended.output[-1500:]}"
    return outcome


def unpublished(folder: Path) -> Outcome:
    """The first two checkpoints cannot be published: --keep counts them, so that a full disk does not stay full."""
    ended = run_job(folder, 1, Fault("no publication", iteration=6), "--keep", "1")
    left = sorted(path.name for path in (folder / "c").glob("iter_*"))
    good = ended.status == 0 and ended.losses == uninterrupted(1) and "iter_0000002" not in left
    return verdict(good and ended.output.count("stale file handle") == 2, ended)


def owning(folder: Path) -> Outcome:
    """Killed while it takes the folder of --save: the next start removes the unfinished record."""
    ended = run_job(folder, 1, Fault("kill in owner"), restarts=1)
    outcome = compared(ended, uninterrupted(1))
    left = sorted(path.name for path in (folder / "c" / "owner").glob("*.tmp"))
    if left or not ended.strikes:
        outcome.survived, outcome.note = 0, f"{left} {ended.output[-2000:]}"
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
        harm(root, root / "iter_0000006")
        ended = run_job(folder, 1, NONE)
        outcome = compared(ended, want)
        outcome.lost_steps = [6 - (ended.starts[1]["first"] - 1)] if len(ended.starts) > 1 else [0]
        return told(outcome, ended, "WARNING")

    return case


def flip(path: Path) -> None:
    """One bit at a random place of the file."""
    position, bit = (random.Random(path.name).randrange(most) for most in (path.stat().st_size, 8))
    flip_bit(path, position, bit)


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


def bad_data(suffix: str, harm: Callable[[Path], None]) -> Callable[[Path], Outcome]:
    """A damaged .idx or .bin beside its sound partner, by the run and by ``data check``."""

    def case(folder: Path) -> Outcome:
        folder.mkdir(parents=True)
        text, prefix, model = folder / "text.jsonl", str(folder / "data"), str(folder / "t.model")
        text.write_text("".join(f'{{"text": "one two three four five six seven {i}"}}\n' for i in range(2000)))
        made = data("train-tokenizer", "--input", str(text), "--vocab-size", "101", "--output", model)
        made += data("prepare", "--input", str(text), "--tokenizer-model", model, "--output", prefix)
        file = Path(prefix + suffix)
        if not file.exists():
            return Outcome(1, 0, note=made[-1500:])
        harm(file)
        ended = run_job(folder, 1, NONE, "--data-path", prefix)
        checked = data("check", prefix, "--vocab-size", "101")
        early = ended.status == 2 and "the configuration is refused" in ended.output
        late = ended.status == 2 and "DataError" in ended.output
        named = f"{folder / 'data'}." in ended.output and not ended.losses
        good = (early or late) and named and "Traceback" not in ended.output + checked and "data." in checked
        return Outcome(1, int(good), note="" if good else ended.output[-1500:] + checked[-500:])

    return case


def data(*line: str) -> str:
    """What ``megapar data`` says."""
    command = [sys.executable, "-m", "megapar.tools.main", "data", *line]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT)
    return done.stdout + done.stderr


def foreign(*names: str) -> Callable[[Path], Outcome]:
    """Files of the newest local checkpoint are damaged before the restart takes it: the one before it is taken."""

    def case(folder: Path) -> Outcome:
        flags = (*SHARDING, "--local-checkpoint-interval", "1", "--save-interval", "0")
        flags = (*flags, "--local-checkpoint-dir", str(folder / "memory"))
        ended = run_job(folder, 2, Fault("damage local", 1, 5, name=names[0], harm=names[1]), *flags, restarts=1)
        return told(compared(ended, uninterrupted(2, *SHARDING)), ended, "taking the local checkpoint of iteration 3")

    return case


def damaged_above_local(folder: Path) -> Outcome:
    """The newest checkpoint on disk is damaged: the local one goes first, not the older one on disk."""
    flags = ("--local-checkpoint-interval", "3", "--local-checkpoint-dir", str(folder / "memory"))
    ended = run_job(folder, 1, Fault("damage disk", 0, 5, name=str(folder / "c")), *flags, restarts=1)
    return told(compared(ended, uninterrupted(1)), ended, "taking the local checkpoint of iteration 3", "WARNING")


def special(folder: Path) -> Outcome:
    """The newest checkpoint's layout is a pipe, which nobody waits for: the one before it is taken."""
    want = uninterrupted(1)
    run_job(folder, 1, NONE)
    layout = folder / "c" / "iter_0000006" / "layout.json"
    layout.unlink()
    os.mkfifo(layout)
    ended = run_job(folder, 1, NONE)
    outcome = compared(ended, want)
    outcome.lost_steps = [2]
    return told(outcome, ended, "WARNING", "resumed at iteration 4")


def full_disk(size: str, fault: Fault, told: str) -> Callable[[Path], Outcome]:
    """A tmpfs with room for one checkpoint: the others are not written, training goes on, the first stays sound."""

    def case(folder: Path) -> Outcome:
        root = folder / "c"
        root.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)]
        if subprocess.run(mount, capture_output=True).returncode:
            return Outcome(0, 0, note="no right to mount a tmpfs here")
        try:
            ended = run_job(folder, 1, fault)
            kept = sorted(path.name for path in root.iterdir())
            other = ("--save", str(folder / "other"), "--save-interval", "0", "--exit-interval", "3")
            sound = run_job(folder, 1, NONE, *other)
            # The final checkpoint is the only one that must not fail: the run has done its steps, and says so by 1.
            good = ended.losses == uninterrupted(1) and ended.status == 1 and ended.output.count(told) >= 2
            good = good and kept == ["iter_0000002", "latest", "owner"] and "resumed at iteration 2" in sound.output
            return verdict(good, ended, sound)
        finally:
            subprocess.run(["umount", str(root)], check=False)

    return case


def read_only(folder: Path) -> Outcome:
    """A target that takes no file is told before the first step, which nobody would want to lose."""
    ended = run_job(folder, 1, NONE, "--save", "/sys/megapar", "--load", "/sys/megapar")
    good = not ended.losses and ended.status == 1 and "--save /sys/megapar cannot be written" in ended.output
    return verdict(good, ended)


def cases(kills: int, seed: int) -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    for layout, flags in (("sharding 2", SHARDING), ("mp 2", MP), ("stage 3", (*SHARDING, "--sharding-stage", "3"))):
        yield f"kill -9 in a step, {layout}", died("kill in step", 1, 2, *flags)
    yield "kill -9 in a step, 4 ranks", died("kill in step", 3, 4, *FOUR)
    phases = (("in shard", 1), ("in shard", 0), ("in scalars", 0), ("in manifest", 0), ("before rename", 0))
    for phase, rank in (*phases, ("after rename", 0), ("in latest", 0)):
        yield f"kill -9 in a save: {phase}, rank {rank}", died(f"kill {phase}", rank, 2, *SHARDING)
    yield "kill -9 at random moments", random_kills("kill at random", kills, 1.0, seed)
    yield "kill -9 at random moments of every phase", random_kills("kill in a phase at random", kills, 0.005, seed)
    yield "kill -9 with local checkpoints only", local()
    yield "kill -9 with local checkpoints of a job named '..' beside strangers' files", beside_others
    yield "kill -9 while taking --save", owning
    yield "checkpoints cannot be published for a while", unpublished
    yield "one of two nodes killed, no other comes", node_lost(False)
    yield "one of two nodes killed, another comes", node_lost(True)
    yield "SIGTERM", stopped("SIGTERM")
    yield "SIGUSR1", stopped("SIGUSR1")
    yield "SIGSTOP", still
    yield "killed, continued on mp 2", moved(*MP)
    yield "killed, continued on one process", moved()
    yield "killed, continued on 4 ranks, mp 2 x sharding 2", moved(*FOUR)
    yield from damages()
    yield "NaN on one rank, once", bad_once
    yield "NaN on one rank, for good", bad_for_good
    yield "divergence of a replica, mp 2", diverged(MP)
    yield "divergence of a replica, dp 2", diverged(DP)
    yield "disk full, seen before the save", full_disk("2m", NONE, "no room under")
    yield "disk full, seen while writing", full_disk("1m", Fault("no space check"), "No space left on device")
    yield "read-only target", read_only
    yield "newest checkpoint damaged and a sound local one", damaged_above_local
    yield "special file in a checkpoint, pipe for layout.json", special
    yield "wrong world size", refused(2, "world-size", "--sharding-degree", "3")


def damages() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Files that are not what was written."""
    for name, harm in (("bit flip", flip), ("truncation", cut)):
        yield f"{name} in a shard", damaged(lambda root, newest, harm=harm: harm(a_shard(newest)))
        for file in ("layout.json", "scalars.json"):
            yield f"{name} in {file}", damaged(lambda root, newest, harm=harm, file=file: harm(newest / file))
        for file in ("safetensors", "json"):
            yield f"{name} in a local checkpoint's .{file}", foreign(file, name)
    yield "latest is empty", damaged(lambda root, newest: _lost(root, newest, ""))
    yield "latest is garbage", damaged(lambda root, newest: _lost(root, newest, "\0\1garbage"))
    yield "latest names a missing folder", damaged(lambda root, newest: shutil.rmtree(newest))
    yield "truncated .idx", bad_data(".idx", cut)
    yield "corrupt .idx", bad_data(".idx", spoil_index)
    yield "truncated .bin", bad_data(".bin", cut)


def spoil_index(path: Path) -> None:
    """Another length of the first sequence."""
    content = bytearray(path.read_bytes())
    content[34] ^= 4
    path.write_bytes(content)


def _lost(root: Path, newest: Path, latest: str) -> None:
    shutil.rmtree(newest)
    (root / "latest").write_text(latest)
