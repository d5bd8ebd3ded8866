"""One call of the GPU day: its parts in order, each in a process of its own, within so many minutes.

A part that crashes, hangs or poisons its device ends alone; what it had found stands in the file. A later call goes on
where this one was cut off.
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
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_day.day import MODELS, Day
from scripts.gpu_day.findings import PART, Findings

ROOT = Path(__file__).parents[2]
# In this order, with their shares of the minutes; what one leaves over is for those behind it.
PARTS = {
    "operators": 2.0,
    "ampipe": 1.5,
    "waits": 2.0,
    "kernels": 2.0,
    "equivalence": 2.5,
    "micro": 2.0,
    "throughput": 9.5,
    "curve": 3.0,
    "predicted": 0.2,
}
KEPT = 0.9  # of a part's time: what is not done by then is left out; the rest is for what runs
SUMMARY = "summary"


def main() -> int:
    """0 all that was asked for is done and right, 1 something is wrong or not done."""
    asked = _asked()
    asked.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * asked.minutes
    commit = asked.commit or _commit()
    findings = Findings(asked.out / "findings.jsonl", {"device": asked.device, "small": asked.small, "commit": commit})
    if (status := _introduce(findings, asked)) != 0:
        return status
    left = dict.fromkeys(asked.parts)
    for part in asked.parts:
        share = PARTS[part] / sum(PARTS[name] for name in left)
        del left[part]
        _run(part, asked, findings, max(0.0, ends - time.monotonic()) * share)
    return _sum_up(findings, asked.parts)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_day.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything that is run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes at which every line runs in a minute, on a CPU too")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all of them")
    parser.add_argument("--models", default=",".join(MODELS), help="whose throughput is raced; default: all of them")
    parser.add_argument("--again", action="store_true", help="find again what an earlier call has found")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_day", help="where findings.jsonl is added to")
    parser.add_argument("--commit", help="of this tree, where it is a copy without its history")
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    asked.models = tuple(model for model in MODELS if model in asked.models.split(","))
    asked.parts = [part for part in PARTS if part in asked.parts.split(",")]
    unknown = set(parser.parse_args().parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return asked


def _commit() -> str:
    line = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _introduce(findings: Findings, asked: argparse.Namespace) -> int:
    """Say what this machine is, from a process of its own: what has seen a GPU cannot fork."""
    process = multiprocessing.get_context("fork").Process(target=_say_machine, args=(findings, asked.device))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
        findings.tell("machine", PART, False, error="the device did not answer within 120 s")
    return int(process.exitcode != 0)


def _say_machine(findings: Findings, device: str) -> None:
    said: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if device == "cuda":
        if not torch.cuda.is_available():
            findings.tell("machine", PART, False, error="torch sees no GPU", **said)
            sys.exit(1)
        said |= {"gpu": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability())}
        said |= {"cuda": torch.version.cuda, "memory_bytes": torch.cuda.get_device_properties(0).total_memory}
    findings.tell("machine", PART, True, **said)


def _run(part: str, asked: argparse.Namespace, findings: Findings, seconds: float) -> None:
    """One part, ended by force where it does not end."""
    before = {what: line for (name, what), line in findings.read().items() if name == part}
    own = before.get(PART, {})
    if not asked.again and own.get("ok") and set(asked.models) <= set(own["models"]):
        print(f"      {part}: done by an earlier call", flush=True)
        return
    good = {what for what, line in before.items() if line["ok"] is not False and "left_out" not in line}
    told = frozenset() if asked.again else frozenset(good - {PART})
    began = time.monotonic()
    day = Day(part, asked.device, asked.small, asked.out, began + KEPT * seconds, findings, told)
    day.models = asked.models
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(part, day))
    process.start()
    process.join(seconds)
    took = round(time.monotonic() - began, 1)
    if process.is_alive():
        process.kill()
        process.join()
        findings.tell(part, PART, False, error="cut off", seconds=took, minutes_given=seconds / 60)
    elif process.exitcode != 0:
        findings.tell(part, PART, False, error=f"ended with status {process.exitcode}", seconds=took)
    assert process.pid is not None
    _end_session(process.pid)


def _end_session(leader: int) -> None:
    """What a part has started and left behind: processes of its session, which nobody else is in."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            # The fields behind the command's name, which may hold anything: state, parent, group, session.
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            if session == leader:
                os.kill(int(folder.name), signal.SIGKILL)


def _in_child(part: str, day: Day) -> None:
    """The part's own process, the first of a session that is ended together."""
    os.setsid()
    if day.device == "cpu" and day.small:  # threads that wait for each other are most of a small day's time
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    began = time.monotonic()
    module = importlib.import_module(f"scripts.gpu_day.{part}")
    module.run(day)
    figures = {"seconds": round(time.monotonic() - began, 1), "left_out": day.missing, "models": day.models}
    day.findings.tell(part, PART, not day.missing, **figures)


def _sum_up(findings: Findings, parts: list[str]) -> int:
    """A table, and a last line with what is wrong."""
    lines = findings.read()
    wrong, rows = [], []
    for part in parts:
        mine = {what: line for (name, what), line in lines.items() if name == part and what != PART}
        own = lines.get((part, PART), {})
        bad = [what for what, line in mine.items() if line["ok"] is False]
        wrong += [f"{part}: {what}" for what in bad]
        if not own.get("ok"):
            wrong.append(f"{part}: {own.get('error', 'not all of it was run')}")
        right = sum(line["ok"] is True for line in mine.values())
        rows.append(
            (part, len(mine), right, len(bad), own.get("seconds", "-"), "done" if own.get("ok") else "not done")
        )
    print(f"\n{'part':12} {'findings':>8} {'right':>6} {'wrong':>6} {'seconds':>8}")
    for name, number, right, bad_ones, seconds, state in rows:
        print(f"{name:12} {number:8} {right:6} {bad_ones:6} {seconds:>8} {state}")
    findings.tell(SUMMARY, ",".join(parts), not wrong, wrong=wrong)
    print(json.dumps({"wrong": wrong, "findings": str(findings.path)}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
