"""600 steps with checkpoints in the background: killed runs repeat every bit; memory, files and steps stay flat.

    python -m benchmarks.long_run.run [--steps 600] [--restarts 3] [--shape gpt-oss] [--only NAME ..] [--results FOLDER]

The quickstart's size in DeepSeek-V3's shape, or in GPT-OSS's with Muon. Four runs, one after the other: experts over
two processes, tensors over two processes, and both again with a process killed three times, after which the launcher
restarts all from the last checkpoint. Every two seconds it records what each process holds, and the time of a fixed
amount of work, to which steps are compared, because the speed of a shared machine changes; every 40 steps, what rank
0 has in use. Status 1 if a run did not end, if a loss of a killed run differs in a bit from that of the undisturbed
run, or if a late figure exceeds an early one by more than LIMITS allows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support.table import machine, print_json, print_table

ROOT = Path(__file__).parents[2]
QUICKSTART = ("--config", "configs/quickstart.yaml", "--untie-embeddings-and-output-weights")
# Latent attention, sigmoid scores in groups with a bias, balance of single sequences, a shared expert beside routed
# ones, dense layers first, and multi-token prediction; untied, as published.
DEEPSEEK_V3 = (
    *QUICKSTART,
    *("--multi-latent-attention", "--num-query-groups", "4", "--q-lora-rank", "96", "--kv-lora-rank", "64"),
    *("--qk-head-dim", "32", "--qk-pos-emb-head-dim", "16", "--v-head-dim", "32"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-num-groups", "4", "--moe-router-group-topk", "2"),
    *("--moe-router-topk-scaling-factor", "2.5", "--moe-aux-loss-coeff", "0", "--moe-seq-aux-loss-coeff", "1e-4"),
    *("--mtp-depth", "1", "--mtp-block", "layer", "--mtp-loss-weight", "0.3"),
)
# Sinks, a window in every second layer, biases everywhere, clamped swiglu, four of eight experts; with Muon.
GPT_OSS = (
    *QUICKSTART,
    *("--attention-sinks", "--window-size", "64", "--window-attn-skip-freq", "2", "--activation", "clamped_swiglu"),
    *("--add-bias-linear", "--moe-router-linear-bias", "--moe-router-topk", "4", "--moe-shared-experts", "0"),
    *("--first-k-dense", "0", "--moe-router-bias-update-rate", "0", "--optimizer", "muon"),
)
SHAPES = {"deepseek-v3": DEEPSEEK_V3, "gpt-oss": GPT_OSS}
EXPERTS = ("--ep-degree", "2")
TENSORS = ("--ep-degree", "1", "--mp-degree", "2", "--sequence-parallel")
LOOK_SECONDS = 2.0
SHORTEST_START = 100  # steps of a start, below which there is no look at it
# Parts of a run, or of its last start, that are compared. glibc's heap, from which megapar lets it return nothing,
# grows during the first half, while what is in use does not: the sum of heap and rest is compared after that (FILLED),
# what is in use of the heap, and the rest, throughout.
EARLY, FILLED, LATE = (0.1, 0.3), (0.6, 0.8), (0.8, 1.0)
# Kills are in the first part of a run, so that the last start has many steps, over which its memory is compared.
KILLS_UNTIL = 0.5
SAVED_EVERY = 40  # steps; no kill comes at a step that is saved
# Steps of a run, below which the early part of its last start, after its first save, may have no count.
SHORTEST = round((SAVED_EVERY / (EARLY[1] - EARLY[0]) + SAVED_EVERY) / (1 - KILLS_UNTIL))
EVALUATED_EVERY = 20  # steps; each start evaluates before the early part, so that what this loads is there
# Late over early. steps_over_work: seconds of a step relative to those of the fixed work. live_bytes: malloc has handed
# them out on rank 0. resident_bytes includes what an allocator keeps; files may not grow. python_blocks_per_step is not
# a ratio: two numbers are two blocks; a kept record has dozens.
LIMITS = {
    "steps_over_work": 1.1,
    "live_bytes": 1.01,
    "bytes_outside_heap": 1.05,
    "resident_bytes": 1.05,
    "files": 1.0,
    "threads": 1.0,
    "python_blocks_per_step": 2,
}
WORK = bytes(8 << 20)
KILLED = ", killed"
LAYOUTS = {
    name + ending: layout
    for name, layout in (("experts over 2", EXPERTS), ("tensors over 2", TENSORS))
    for ending in ("", KILLED)
}


@dataclass(frozen=True)
class Held:
    """Resources that one process holds at one time. ``iteration``: the last one in the metrics at that time."""

    iteration: int
    rank: int
    attempt: int
    resident_bytes: int
    files: int
    threads: int


@dataclass
class Run:
    """One run.

    Attributes:
        status: Exit status of the launcher.
        records: Records of the metrics, the last one of each iteration.
        kills: Iterations before each kill.
        work: (iteration, seconds of a core that the fixed work took at that time).
        counted: What rank 0 had in use (``counted.py``), of the last start, by iteration.
    """

    status: int
    records: dict[int, dict[str, float]]
    held: list[Held]
    kills: list[int] = field(default_factory=list)
    work: list[tuple[int, float]] = field(default_factory=list)
    counted: dict[int, dict[str, float]] = field(default_factory=dict)


def run(name: str, shape: str, folder: Path, steps: int, kills: list[int]) -> Run:
    """Train to the end. A process is killed each time that the metrics reach one of these iterations."""
    metrics = folder / "metrics.jsonl"
    line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", "2"]
    line += ["--max-restarts", str(len(kills)), "benchmarks/long_run/counted.py", *SHAPES[shape], *LAYOUTS[name]]
    line += ["--train-iters", str(steps), "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-3"]
    line += ["--log-interval", "1", "--metrics-jsonl", str(metrics)]
    line += ["--eval-interval", str(EVALUATED_EVERY), "--eval-iters", "2"]
    line += ["--save", str(folder / "c"), "--load", str(folder / "c"), "--async-save"]
    line += ["--save-interval", str(SAVED_EVERY), "--keep", "2"]
    counted = {"every": SAVED_EVERY, "file": str(folder / "counted.jsonl")}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BENCHMARK_COUNTED": json.dumps(counted)}
    done = Run(1, {}, [])
    waiting = list(kills)
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(line, cwd=ROOT, env=environ, stdout=log, stderr=log) as job,
    ):
        while job.poll() is None:
            time.sleep(LOOK_SECONDS)
            iteration = max(_records(metrics), default=0)
            ranks = list(_ranks(job.pid))
            done.work.append((iteration, _fixed_work()))
            done.held += [held for pid, rank in ranks if (held := _held(pid, rank, iteration, len(done.kills)))]
            if waiting and iteration >= waiting[0] and ranks:
                os.kill(ranks[-1][0], signal.SIGKILL)
                done.kills.append(iteration)
                waiting.pop(0)
    done.status, done.records = job.returncode, _records(metrics)
    done.counted = _records(folder / "counted.jsonl")
    if done.status:
        print((folder / "log").read_text()[-3000:], file=sys.stderr)
    return done


def _fixed_work() -> float:
    """Return the processor seconds of a fixed amount of work, which do not include the ranks' use of the core."""
    start = time.thread_time()
    hashlib.sha256(WORK).digest()
    return time.thread_time() - start


def _records(metrics: Path) -> dict[int, dict[str, float]]:
    """Return the metrics by iteration, the last ones of a repeated iteration. Skips a line that is being written."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return {record["iteration"]: record for record in map(json.loads, lines)}


def _ranks(launcher: int) -> Iterator[tuple[int, int]]:
    """Yield (process number, rank) of the launcher's children that are ranks."""
    for task in Path(f"/proc/{launcher}/task").glob("*/children"):
        try:
            for pid in map(int, task.read_text().split()):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for entry in environ:
                    if entry.startswith(b"RANK="):
                        yield pid, int(entry[5:])
        except (FileNotFoundError, ProcessLookupError):
            continue


def _held(pid: int, rank: int, iteration: int, attempt: int) -> Held | None:
    """Return what a process holds now; None if it has just ended."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "VmRSS" not in status:
        return None
    return Held(iteration, rank, attempt, 1024 * int(status["VmRSS"].split()[0]), files, int(status["Threads"]))


def growth(done: Run, steps: int) -> dict[str, float]:
    """Return late over early medians of steps, fixed work, and what rank 0 held since the last start's first save."""
    seconds = [(i, record["iteration_seconds"]) for i, record in done.records.items()]
    found = {"step_seconds": _late_over_early(seconds, 0, steps), "work_seconds": _late_over_early(done.work, 0, steps)}
    found["steps_over_work"] = found["step_seconds"] / found["work_seconds"]
    last = max(held.attempt for held in done.held)
    own = [held for held in done.held if held.rank == 0 and held.attempt == last]
    # Saving in the background takes a copy of the state in host memory and a thread, at the first save of a start.
    start = (min(held.iteration for held in own) // SAVED_EVERY + 1) * SAVED_EVERY
    for name, early in (("resident_bytes", FILLED), ("files", EARLY), ("threads", EARLY)):
        values = [(held.iteration, getattr(held, name)) for held in own]
        found[name] = _late_over_early(values, start, steps, early)
    names = ("live_bytes", "bytes_outside_heap", "python_blocks")
    counted = {name: [(i, line[name]) for i, line in done.counted.items()] for name in names}
    for name in names[:2]:
        found[name] = _late_over_early(counted[name], start, steps)
    between = (sum(LATE) - sum(EARLY)) / 2 * (steps - start)
    before, after = (_part(counted["python_blocks"], start, steps, part) for part in (EARLY, LATE))
    found["python_blocks_per_step"] = (after - before) / between
    return found


def _late_over_early(
    values: list[tuple[int, float]], start: int, end: int, early: tuple[float, float] = EARLY
) -> float:
    """Return the ratio of medians of (iteration, value) pairs, of iterations after ``start`` up to ``end``."""
    return _part(values, start, end, LATE) / _part(values, start, end, early)


def _part(values: list[tuple[int, float]], start: int, end: int, part: tuple[float, float]) -> float:
    """Return the median value in a part of the iterations from ``start`` to ``end``."""
    length = end - start
    return statistics.median(value for i, value in values if part[0] * length < i - start <= part[1] * length)


def _differences(plain: Run, killed: Run) -> int:
    """Return the number of steps whose loss or gradient norm differs in a bit."""
    names = ("loss", "lm_loss", "grad_norm")
    steps = plain.records.keys() | killed.records.keys()
    return sum(
        any(plain.records[i][name] != killed.records[i][name] for name in names)
        if i in plain.records and i in killed.records
        else 1
        for i in steps
    )


def main() -> int:
    """Run, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--shape", choices=list(SHAPES), default="deepseek-v3")
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.steps < SHORTEST or options.steps * KILLS_UNTIL < SHORTEST_START * options.restarts:
        parser.error(f"compares {SHORTEST} steps and more, and {SHORTEST_START} and more of every start")
    kills = [round(options.steps * KILLS_UNTIL * part / options.restarts) for part in range(1, options.restarts + 1)]
    runs: dict[str, Run] = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = run(name, options.shape, Path(folder), options.steps, kills if name.endswith(KILLED) else [])
    rows, found = [], dict[str, dict]()
    for name, done in runs.items():
        grown = growth(done, options.steps)
        losses = [done.records[i]["lm_loss"] for i in sorted(done.records)]
        found[name] = {"status": done.status, "steps": len(losses), "kills": done.kills, "late_over_early": grown}
        found[name]["counted"] = list(done.counted.values())
        ends = (f"{statistics.mean(losses[:20]):.3f}", f"{statistics.mean(losses[-100:]):.3f}")
        rows.append(
            (name, str(len(losses)), *ends, str(len(done.kills)), *(f"{value:.3f}" for value in grown.values()))
        )
    heads = ("run", "steps", "first 20 losses", "last 100", "kills")
    ratios = ("late / early: seconds of a step", "of fixed work", "steps / work", "memory held", "files", "threads")
    print_table((*heads, *ratios, "memory in use", "outside the heap", "blocks of Python a step"), rows)
    bad = any(done.status or len(done.records) != options.steps for done in runs.values())
    for name in runs:
        for what, value in found[name]["late_over_early"].items():
            if what in LIMITS and value > LIMITS[what]:
                print(f"{name}: {what} grew to {value:.3f} of what it was early; at most {LIMITS[what]} wanted")
                bad = True
    result: dict[str, object] = {
        "benchmark": "long run",
        "shape": options.shape,
        "machine": machine("cpu"),
        "runs": found,
    }
    differ = {name: _differences(runs[name], killed) for name in runs if (killed := runs.get(name + KILLED))}
    for name, number in differ.items():
        print(f"{name}: losses of the killed run that differ from the other's: {number} of {len(runs[name].records)}")
        bad = bad or number > 0
    result["differ"] = differ
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "long_run.json").write_text(json.dumps(result, indent=1) + "\n")
    print_json(result)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
