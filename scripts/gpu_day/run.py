"""Run the parts of the GPU day in order, each in a separate process, within a number of minutes.

A part that crashes, hangs or breaks its device does not affect the others, and its findings are already in the file. A
later call continues where this one stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_day.day import MODELS, PART, Day, Findings

ROOT = Path(__file__).parents[2]
# In order of worth, with the seconds that each may take on a GPU.
PARTS = {
    "ranks": 190,
    "hazards": 14,
    "theft": 30,
    "copies": 16,
    "fp8": 42,
    "apex": 10,
    "host": 60,
    "clock": 40,
    "throughput": 300,
    "attention": 30,
    "waits": 60,
    "equivalence": 75,
    "ampipe": 45,
    "operators": 60,
    "kernels": 60,
    "micro": 60,
    "curve": 90,
    "predicted": 10,
}
SLOWER = 10  # times as long on a CPU
KEPT = 0.9  # fraction of a part's time after which no attempt starts; the rest is for the running attempt
SUMMARY = "summary"


def main() -> int:
    """Run the requested parts. Return 0 if everything is done and right, 1 otherwise."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    commit = options.commit or _commit()
    findings = Findings(
        options.out / "findings.jsonl", {"device": options.device, "small": options.small, "commit": commit}
    )
    if (status := _introduce(findings, options)) != 0:
        return status
    for part in options.parts:
        seconds = PARTS[part] * (SLOWER if options.device == "cpu" else 1)
        _run(part, options, findings, max(0.0, min(seconds, ends - time.monotonic())))
    return _sum_up(findings, options.parts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_day.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="time limit of all parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that all parts run in two minutes, even on a CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"parts of {', '.join(PARTS)}; default: all")
    parser.add_argument("--models", default=",".join(MODELS), help="models of the throughput races; default: all")
    parser.add_argument("--again", action="store_true", help="repeat what an earlier call has completed")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu_day", help="folder of findings.jsonl, which is appended to"
    )
    parser.add_argument("--commit", help="commit of this tree, if it is a copy without a git history")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.models = tuple(_chosen(parser, "models", options.models, MODELS))
    options.parts = _chosen(parser, "parts", options.parts, tuple(PARTS))
    return options


def _chosen(parser: argparse.ArgumentParser, what: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a list with commas, in its order. Exits with a message if one is unknown."""
    named = text.split(",")
    if unknown := sorted(set(named) - set(known)):
        parser.error(f"no such {what}: {', '.join(unknown)}. Choose from {', '.join(known)}.")
    return named


def _commit() -> str:
    line = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _introduce(findings: Findings, options: argparse.Namespace) -> int:
    """Record the machine from a separate process, because a process that has used a GPU cannot fork."""
    process = multiprocessing.get_context("fork").Process(target=_record_machine, args=(findings, options.device))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
        findings.record("machine", PART, False, error="the device did not answer within 120 s")
    return int(process.exitcode != 0)


def _record_machine(findings: Findings, device: str) -> None:
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if device == "cuda":
        if not torch.cuda.is_available():
            findings.record("machine", PART, False, error="torch does not find a GPU", **facts)
            sys.exit(1)
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability())}
        facts |= {"cuda": torch.version.cuda, "memory_bytes": torch.cuda.get_device_properties(0).total_memory}
    findings.record("machine", PART, True, **facts)


def _run(part: str, options: argparse.Namespace, findings: Findings, seconds: float) -> None:
    """Run one part, and kill it if it exceeds its time."""
    before = {what: line for (name, what), line in findings.read().items() if name == part}
    own = before.get(PART, {})
    if not options.again and own.get("ok") and set(options.models) <= set(own["models"]):
        print(f"      {part}: done by an earlier call", flush=True)
        return
    complete = {what for what, line in before.items() if line["ok"] is not False and "left_out" not in line}
    known = frozenset() if options.again else frozenset(complete - {PART})
    began = time.monotonic()
    day = Day(part, options.device, options.small, options.out, began + KEPT * seconds, findings, known)
    day.models = options.models
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(part, day))
    process.start()
    process.join(seconds)
    took = round(time.monotonic() - began, 1)
    if process.is_alive():
        process.kill()
        process.join()
        findings.record(part, PART, False, error="cut off", seconds=took, minutes_given=seconds / 60)
    elif process.exitcode != 0:
        findings.record(part, PART, False, error=f"ended with status {process.exitcode}", seconds=took)
    assert process.pid is not None
    _end_session(process.pid)


def _end_session(leader: int) -> None:
    """Kill the processes that a part has left behind: those of its session, which contains no other processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            # The fields after the command name, which may contain anything: state, parent, group, session.
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(folder.name), signal.SIGKILL)


def _in_child(part: str, day: Day) -> None:
    """Run a part as the leader of a new session, whose processes are killed together."""
    os.setsid()
    if day.device == "cpu" and day.small:  # waiting threads would dominate a small day
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    began = time.monotonic()
    module = importlib.import_module(f"scripts.gpu_day.{part}")
    module.run(day)
    figures = {"seconds": round(time.monotonic() - began, 1), "left_out": day.missing, "models": day.models}
    day.findings.record(part, PART, not day.missing, **figures)


def _sum_up(findings: Findings, parts: list[str]) -> int:
    """Print a table and, as the last line, the problems as JSON. Return 1 if there are problems."""
    lines = findings.read()
    wrong, rows = [], []
    for part in parts:
        mine = {what: line for (name, what), line in lines.items() if name == part and what != PART}
        own = lines.get((part, PART), {})
        bad = [what for what, line in mine.items() if line["ok"] is False]
        wrong += [f"{part}: {what}" for what in bad]
        if not own.get("ok"):
            wrong.append(f"{part}: {own.get('error', 'not completed')}")
        right = sum(line["ok"] is True for line in mine.values())
        rows.append(
            (part, len(mine), right, len(bad), own.get("seconds", "-"), "done" if own.get("ok") else "not done")
        )
    print(f"\n{'part':12} {'findings':>8} {'right':>6} {'wrong':>6} {'seconds':>8}")
    for name, number, right, bad_ones, seconds, state in rows:
        print(f"{name:12} {number:8} {right:6} {bad_ones:6} {seconds:>8} {state}")
    findings.record(SUMMARY, ",".join(parts), not wrong, wrong=wrong)
    print(json.dumps({"wrong": wrong, "findings": str(findings.path)}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
