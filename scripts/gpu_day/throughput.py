"""Races of dense, MoE and ERNIE models against transformers with torch.compile and against the sum of their kernels.

The races are those of ``benchmarks/throughput``, plain and with --compile, with a process per contestant. Each adds its
line to ``throughput.jsonl`` next to the findings immediately. MFU counts half of causal attention, relative to the peak
in the data sheet (989 TFLOP/s for an H200 in bf16). Races have the routing of random weights, which is nearly balanced;
then the MoE step is timed with forced balance, and with its own routing after 500 training steps. The prediction of
``megapar plan`` for the same flags is recorded as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.throughput.ours_rank import flags
from benchmarks.throughput.shape import Shape, find
from megapar.arguments import Config, parse
from megapar.core.device.kinds import kinds
from megapar.core.device.peak import peak_flops
from megapar.model.flops import step_flops
from megapar.moe.router import Router
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.training.step.dtypes import compute_dtype
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.step_profile import profiled
from scripts.gpu_day.trainers import losses, step_seconds, trainer

WAYS = ("--compile", "")  # megapar's contestants; the first is the basis of all comparisons
LOAD_BALANCE = "--moe-aux-loss-coeff 0.01"
TRAINED, TIMED = 500, 10
ROOT = Path(__file__).parents[2]


def run(day: Day) -> None:
    """Run every race and its plan, then the MoE with different routings."""
    models = ("tiny-moe",) if day.small else day.models
    path = day.out / "throughput.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(models):
            share = 1 / (len(models) - number + (0.5 if "moe" in models else 0.0))
            day.attempt(f"race of {model}", partial(_race, day, model, Path(folder), path, share), least=10.0)
            for way in _ways(day):
                day.attempt(f"plan of {model} {way}".strip(), partial(_planned, day, model, way, Path(folder)))
                work = partial(_profiled, day, model, way, Path(folder))
                day.attempt(f"profile of {model} {way}".strip(), work, least=10.0)
        moe = "tiny-moe" if day.small else "moe"
        if moe not in models:
            return
        for name, steps in (("forced balance", 0), ("its own routing", 4 if day.small else TRAINED)):
            work = partial(_routed, day, moe, steps, Path(folder))
            day.attempt(f"{moe}, {name}, {steps} steps before", work, least=10.0 if day.small else 30.0)


def _ways(day: Day) -> tuple[str, ...]:
    return ("",) if day.small else WAYS


def _race(day: Day, model: str, folder: Path, path: Path, share: float) -> Answer:
    """Race one model; record a finding per contestant and one with the list of contestants."""
    known = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
    line = [sys.executable, "-m", "benchmarks.throughput.run", "--device", day.device, "--model", model]
    line += [f"--flags={way}" for way in _ways(day)] + ["--rounds", "2" if day.small else "5"]
    line += ["--jsonl", str(path), "--folder", str(folder), "--dtype", "bf16" if day.on_gpu else "fp32"]
    line += [] if day.on_gpu else ["--peer", "eager"]
    output, status = _ended([*line], max(5.0, day.seconds_left * share))
    (day.out / f"race_{model}.txt").write_text(output, encoding="utf-8")
    found = (
        [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()[known:]] if path.exists() else []
    )
    ours = [line for line in found if line["contestant"].startswith("megapar")]
    flops = ours[0]["rounds"][0] if ours else {}
    for one in found:
        seconds = one["seconds"]
        figures = {"seconds": seconds, "tokens_per_second": one["tokens"] / seconds, "routing": "of random weights"}
        if flops:
            figures["mfu"] = flops["flops"] / seconds / flops["peak_flops"]
        if "rounds" in one:
            figures["peak_bytes"] = max(each["peak_bytes"] for each in one["rounds"])
            figures["first_loss"] = one["first_loss"]
        else:
            figures["kernels"] = {name: value for name, value in one.items() if isinstance(value, float)}
        day.findings.record(day.part, f"{model}: {one['contestant']}", None, **figures)
    contestants = [one["contestant"] for one in found]
    expected = len(_ways(day)) + 2  # megapar's, the peer, the kernels
    if status or len(contestants) < expected:
        raise RuntimeError(f"status {status}, only {contestants} ran: {output[-1500:]}")
    return Answer(True, {"contestants": contestants, "output": output[-1500:]})


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
        line = [
            sys.executable,
            "-m",
            "benchmarks.throughput.prepare",
            "--device",
            day.device,
            "--model",
            model,
            str(place),
        ]
        output, status = _ended(line, max(5.0, day.seconds_left))
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


def _profiled(day: Day, model: str, way: str, folder: Path) -> Answer:
    """Record where the time of megapar's step goes."""
    _, config = _config(day, model, way, folder)
    with trainer(config, day.device) as made:
        return Answer(None, profiled(day, made))


def planned_kind(device: str) -> str:
    """Return the planner's row for a device, by the driver's name; "" if it has none."""
    found = [kind for kind in kinds() if kind.split("-")[0] in device.lower()]
    return max(found, key=lambda kind: len(kind.split("-")[0]), default="")  # an H200 is not an H20


def _routed(day: Day, model: str, steps: int, folder: Path) -> Answer:
    """Time the MoE step with balanced experts (no steps before), or with the routing after training."""
    forced = not steps
    shape, config = _config(day, model, f"{'--compile' if day.on_gpu else ''} {LOAD_BALANCE}", folder)
    with balanced() if forced else nullcontext(), trainer(config, day.device) as made:
        made.monitor.add(made.step())
        first = step_seconds(day, made, 3)
        left = steps
        while left > 0 and day.seconds_left > 3 * TIMED * first:
            losses(made, min(left, TIMED))
            left -= TIMED
        made.monitor.add(made.step())
        seconds = step_seconds(day, made, 2 if day.small else TIMED)
        made.monitor.add(made.step())
        made.stepper.resolve_pending()
        last = made.monitor.flush()[-1]
        device = made.world.device
        peak, source = peak_flops(device, compute_dtype(config, device))
        work = step_flops(made.job.sizes, shape.micro_batch, shape.seq_length)
    load = last.expert_load
    figures = {"seconds": seconds, "first_seconds": first, "mfu": work / seconds / peak, "peak_from": source}
    figures |= {
        "steps_before": steps - max(0, left),
        "loss": last.lm_loss,
        "expert_load": load[:: max(1, len(load) // 4)],
    }
    return Answer(None, {**figures, "tokens_per_second": shape.tokens / seconds, "forced_balance": forced})


@contextmanager
def balanced() -> Iterator[None]:
    """Make all routers select experts round-robin. No flag does this, because it does not train the router."""

    def choose(router: Router, probs_TE: Tensor) -> Tensor:
        T, E = probs_TE.shape
        first_T = torch.arange(T, device=probs_TE.device) * router.sizes.topk
        choices_k = torch.arange(router.sizes.topk, device=probs_TE.device)
        return (first_T[:, None] + choices_k) % E

    with patch.object(Router, "choose", choose):
        yield
