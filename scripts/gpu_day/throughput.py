"""Races of dense, MoE and ERNIE models against transformers and against the sum of their kernels.

The races are those of ``benchmarks/throughput``, plain and with --compile, with a process per contestant, in the order
of their worth. Each has its own limit of seconds. Each contestant immediately adds its line to a file next to the
findings, named by date, device and commit, also if it did not end. MFU counts half of causal attention, relative to the
peak in the data sheet (989 TFLOP/s for an H100 SXM or an H200 in bf16). Races have the routing of random weights, which
is nearly balanced; then the MoE step is timed with its own routing after training steps, and with forced balance. The
predictions of ``megapar plan`` for the same flags are recorded as well, then profiles of the raced steps. Transformers
under torch.compile comes last: compiled whole, and layer by layer if that does not end in time.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.throughput.ours_rank import RoundAndRound, flags
from benchmarks.throughput.run import COMPILE, LAYERS, LIMIT, MEMORY, WAYS
from benchmarks.throughput.shape import Shape, find
from megapar.arguments import Config, parse
from megapar.core.device.kinds import kinds
from megapar.core.device.peak import peak_flops
from megapar.model.flops import step_flops
from megapar.moe.router import Router
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.trainer import Trainer
from megapar.training.step.dtypes import compute_dtype
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.kernels import profiled
from scripts.gpu_day.trainers import losses, step_seconds, trainer

LOAD_BALANCE = "--moe-aux-loss-coeff 0.01"
TRAINED, TIMED = 150, 10
ROUTED, PROFILED = 60.0, 20.0  # seconds
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Race:
    """A race.

    Attributes:
        model: Name of the shape.
        seconds: Limit of the race with its preparation, on an H100.
        lengths: Lengths of the samples: full or real.
        micro_batches: Micro-batches of an update.
        ways: Flags of megapar's contestants; the first is the basis.
    """

    model: str
    seconds: float
    lengths: str = "full"
    micro_batches: int = 1
    ways: tuple[str, ...] = WAYS

    @property
    def label(self) -> str:
        """Name in the findings."""
        lengths = "" if self.lengths == "full" else f", {self.lengths} lengths"
        return f"{self.model}{lengths}" + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")


RACES = (
    Race("dense", 130.0),
    Race("moe", 140.0),
    Race("ernie", 80.0, "real"),
    Race("ernie", 80.0),
    Race("dense8b", 90.0, ways=("",)),
    Race("dense", 65.0, micro_batches=8, ways=("",)),
    Race("moe", 65.0, micro_batches=8, ways=("",)),
)
COMPILED = (Race("dense", 120.0), Race("moe", 120.0), Race("ernie", 120.0, "real"))
_SMALL = (
    Race("tiny-moe", 300.0, ways=("",)),
    Race("tiny-ernie", 300.0, "real", ways=("",)),
    Race("tiny-moe", 300.0, micro_batches=2, ways=("",)),
)


def run(day: Day) -> None:
    """Run every race, then the MoE with different routings, plans, profiles, and the races with torch.compile."""
    races = _SMALL if day.small else tuple(race for race in RACES if race.model in day.models)
    path = results_file(day)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for race in races:
            work = partial(_race, day, race, folder, path, "eager")
            day.attempt(f"race of {race.label}", work, least=race.seconds / 2)
        moe = "tiny-moe" if day.small else "moe"
        if moe in {race.model for race in races}:
            day.attempt(f"{moe}, its own routing and forced balance", partial(_routed, day, moe, folder), least=30.0)
        whole = [(race, way) for way in WAYS for race in races if race.micro_batches == 1 and way in race.ways]
        for race, way in whole:
            if race.lengths == "full":
                work = partial(_planned, day, race.model, way, folder)
                day.attempt(f"plan of {race.model} {way}".strip(), work)
        for race, way in whole:
            work = partial(_profiled, day, race, way, folder)
            day.attempt(f"profile of {race.label} {way}".strip(), work, least=PROFILED)
        for race in () if day.small else COMPILED:
            if race.model in day.models:
                work = partial(_race, day, race, folder, path, COMPILE)
                day.attempt(f"race of {race.label}, transformers compiled", work, least=race.seconds / 2)


def results_file(day: Day) -> Path:
    """Return the file of the contestants' lines, whose name has date, device and commit."""
    device = planned_kind(torch.cuda.get_device_name()).split("-")[0] or "gpu" if day.on_gpu else "cpu"
    return day.out / f"{date.today().isoformat()}-{device}-{day.findings.facts['commit']}.jsonl"


def _race(day: Day, race: Race, folder: Path, path: Path, peer: str) -> Answer:
    """Run one race; record a finding per contestant and one with the list of contestants."""
    if day.on_gpu:
        torch.cuda.empty_cache()  # what the profiles of this process have left belongs to the contestants
    known = len(_lines(path))
    seconds = min(race.seconds, day.seconds_left)
    line = [sys.executable, "-m", "benchmarks.throughput.run", "--device", day.device, "--model", race.model]
    rounds = 2 if day.small else 5 if race.micro_batches == 1 else 3
    line += [f"--flags={way}" for way in race.ways] + ["--rounds", str(rounds), "--peer", peer]
    line += ["--lengths", race.lengths, "--micro-batches", str(race.micro_batches), "--seconds", f"{seconds:.1f}"]
    line += ["--jsonl", str(path), "--folder", str(folder), "--dtype", "bf16" if day.on_gpu else "fp32"]
    line += ["--commit", str(day.findings.facts["commit"]), *(["--no-limit"] if race.micro_batches > 1 else [])]
    output, status = _ended(line, seconds + 5.0)
    (day.out / f"race_{race.label}_{peer}.txt".replace(", ", "_").replace(" ", "_")).write_text(output, "utf-8")
    lines = _lines(path)
    ours = next((one for one in lines if _basis(one, race)), None)
    for one in lines[known:]:
        ok = False if wrong(one) else None
        day.findings.record(day.part, f"{race.label}: {one['contestant']}", ok, **_figures(one, ours))
    contestants = {one["contestant"]: one.get("reason", "ended") for one in lines[known:]}
    if status or any(map(wrong, lines[known:])):
        raise RuntimeError(f"status {status}, {contestants}: {output[-1500:]}")
    return Answer(True, {"contestants": contestants, "output": output[-1500:]})


def wrong(line: dict[str, Any]) -> bool:
    """Return True if a contestant should have run: a peer may lack memory, and a compiled one may fail."""
    name, reason = line["contestant"], line.get("reason", "")
    if line["ended"] or (reason == MEMORY and not name.startswith("megapar")):
        return False
    return "first loss" in reason or name not in (COMPILE, LAYERS)


def _basis(line: dict[str, Any], race: Race) -> bool:
    """Return True for the line of megapar's first contestant in a race."""
    same = (line["model"], line["lengths"], line["micro_batches"]) == (race.model, race.lengths, race.micro_batches)
    return same and line["contestant"] == "megapar" and bool(line["ended"])


def _figures(line: dict[str, Any], ours: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures of a contestant; the FLOPs of its rounds are those of megapar's."""
    kept = ("seconds", "first_loss", "valid_tokens_per_second", "reason", "output", "took", "machine")
    figures = {name: line[name] for name in kept if name in line}
    if "seconds" not in line:
        return figures
    figures |= {"tokens_per_second": line["tokens"] / line["seconds"], "routing": "of random weights"}
    rounds = line.get("rounds", [line])
    if ours is not None:
        both = zip(ours["rounds"], rounds, strict=False)
        rate = statistics.median(one["flops"] / own["seconds"] for one, own in both)
        figures["mfu"] = rate / ours["rounds"][0]["peak_flops"]
    if line["contestant"] == LIMIT:
        return {
            **figures,
            "kernels": {name: value for name, value in line.items() if isinstance(value, float) and name != "took"},
        }
    return {**figures, "peak_bytes": max(one["peak_bytes"] for one in rounds)}


def _lines(path: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _ended(line: list[str], seconds: float) -> tuple[str, int]:
    """Run a command. Return (output, status). Processes that it started are killed when it ends."""
    with tempfile.TemporaryFile("w+") as printed:
        # Python 3.10 has no process_group; nothing in _lead takes a lock.
        process = subprocess.Popen(line, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, preexec_fn=_lead)  # noqa: PLW1509
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        printed.seek(0)
        return printed.read(), status


def _lead() -> None:
    """Create a process group, so that contestants can be killed together; the session remains that of the part."""
    os.setpgid(0, 0)


def _config(day: Day, model: str, more: str, folder: Path) -> tuple[Shape, Config]:
    """Return shape and configuration of megapar's contestant; prepare the model folder if no race has done it."""
    shape, place = find(day.device, model), folder / f"{day.device}-{model}"
    if not (place / "samples.pt").exists():
        line = [sys.executable, "-m", "benchmarks.throughput.prepare", "--device", day.device, "--model", model]
        output, status = _ended([*line, str(place)], max(5.0, day.seconds_left))
        if status:
            raise RuntimeError(f"the weights could not be created: status {status}: {output[-500:]}")
    line = [*flags(shape, place, day.device, "bf16" if day.on_gpu else "fp32", 1), *more.split()]
    return shape, parse(shape.kind, line, {"WORLD_SIZE": "1", "RANK": "0"})


def _planned(day: Day, model: str, way: str, folder: Path) -> Answer:
    """Record the planner's prediction for this device, if the planner has a row for it."""
    _, config = _config(day, model, way, folder)
    name = torch.cuda.get_device_name().lower() if day.on_gpu else "cpu"
    kind = planned_kind(name)
    if not kind:
        return Answer(None, {"not_to_be_had": f"the planner has no row for {name}"})
    plan = Plan(config, device_kind(kind))
    figures = {"kind": kind, "seconds": plan.speed.step_seconds, "peak_bytes": plan.fullest.peak}
    return Answer(None, {**figures, "reserved_bytes": plan.fullest.reserved, "mfu": plan.speed.mfu})


def _profiled(day: Day, race: Race, way: str, folder: Path) -> Answer:
    """Record where the time of megapar's step goes, on the batches of the race."""
    shape, config = _config(day, race.model, way, folder)
    with trainer(config, day.device) as made:
        made.loader.close()
        made.loader = RoundAndRound(made, shape, folder / f"{day.device}-{race.model}", race.lengths)
        return Answer(None, profiled(day, made))


def planned_kind(device: str) -> str:
    """Return the planner's row for a device, by the driver's name; "" if it has none."""
    found = [kind for kind in kinds() if kind.split("-")[0] in device.lower()]
    return max(found, key=lambda kind: len(kind.split("-")[0]), default="")  # an H200 is not an H20


def _routed(day: Day, model: str, folder: Path) -> Answer:
    """Time the MoE step with its routing before and after training, then with balanced experts."""
    until = time.monotonic() + min(ROUTED, day.seconds_left)
    shape, config = _config(day, model, LOAD_BALANCE, folder)
    wanted, times = (4, 2) if day.small else (TRAINED, TIMED)
    with trainer(config, day.device) as made:
        made.monitor.add(made.step())
        figures: dict[str, Any] = {"first_seconds": step_seconds(day, made, 3)}
        trained = 0
        while trained < wanted and until - time.monotonic() > 4 * TIMED * figures["first_seconds"]:
            losses(made, min(wanted - trained, TIMED))
            trained += TIMED
        own = _timed(day, made, times)
        with balanced():
            forced = _timed(day, made, times)
        device = made.world.device
        peak, source = peak_flops(device, compute_dtype(config, device))
        work = step_flops(made.job.sizes, shape.micro_batch, shape.seq_length)
    figures |= {
        "steps_before": min(trained, wanted),
        "peak_from": source,
        "own_to_forced": own["seconds"] / forced["seconds"],
    }
    for name, found in (("own", own), ("forced", forced)):
        seconds = found["seconds"]
        figures[name] = {**found, "mfu": work / seconds / peak, "tokens_per_second": shape.tokens / seconds}
    return Answer(None, figures)


def _timed(day: Day, made: Trainer, steps: int) -> dict[str, Any]:
    """Return seconds per step after one to warm up, and loss and load of the experts in the step after."""
    made.monitor.add(made.step())
    seconds = step_seconds(day, made, steps)
    made.monitor.add(made.step())
    made.stepper.resolve_pending()
    last = made.monitor.flush()[-1]
    load = last.expert_load
    return {"seconds": seconds, "loss": last.lm_loss, "expert_load": load[:: max(1, len(load) // 4)]}


@contextmanager
def balanced() -> Iterator[None]:
    """Make all routers select experts round-robin. No flag does this, because it does not train the router."""

    def choose(router: Router, probs_TE: Tensor) -> Tensor:
        T, E = probs_TE.shape
        first_T = torch.arange(T, device=probs_TE.device) * router.sizes.topk
        choices_k = torch.arange(router.sizes.topk, device=probs_TE.device)
        return (first_T[:, None] + choices_k) % E

    with patch.object(Router, "choose", choose), patch.object(Router, "is_observed", True):
        yield
