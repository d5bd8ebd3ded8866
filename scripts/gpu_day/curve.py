"""Trainings whose losses must agree: bf16 with fp32, and every mode of running with the plain one.

bf16 and fp32 start from the same weights and use the same learnable samples (``Chain``).
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

from megapar.errors import MegaparError
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.trainers import flags, losses, parsed, trainer

STEPS, SMALL_STEPS, LAST = 200, 6, 20
APART = 0.02  # of the mean loss of the last steps
WAY_STEPS = 20
# ERNIE's tokens are random. At the rate of the other models, rounding decides its loss after a few steps: on an H200
# the fp32 loss stayed at 10.6, and the bf16 losses rose to 10.8 to 11.1 depending on the mode.
RATES = {"ernie": "--lr 1e-4"}
# Allowed relative difference of the last loss from the plain run's.
WAYS = {"--compile": 0.02, "--fp8": 0.05, "--manual-gc": 0.005}


def run(day: Day) -> None:
    """Compare the curves of the MoE and of the dense model, then the modes."""
    for model in ("moe", "dense")[: 1 if day.small else None]:
        day.attempt(f"{model}, bf16 against fp32", partial(_curve, day, model), least=10.0)
    for model in ("dense", "moe", "ernie")[: 1 if day.small else None]:
        for way, apart in WAYS.items():
            day.attempt(f"{model} {way}", partial(_way, day, model, way, apart), least=10.0)


def _curve(day: Day, model: str) -> Answer:
    steps = SMALL_STEPS if day.small else STEPS
    found = {dtype: _losses(day, model, f"--dtype {dtype} --lr 3e-4", steps) for dtype in ("fp32", "bf16")}
    apart = [abs(a - b) / b for a, b in zip(found["bf16"], found["fp32"], strict=True)]
    ends = {dtype: fmean(curve[-LAST:]) for dtype, curve in found.items()}
    learned = day.small or ends["fp32"] < 0.8 * found["fp32"][0]  # otherwise the comparison is meaningless
    ok = learned and abs(ends["bf16"] / ends["fp32"] - 1) <= APART
    figures = {"steps": steps, "ends": ends, "most_apart": max(apart), "apart_at": apart.index(max(apart)) + 1}
    return Answer(
        ok, {**figures, "fp32": found["fp32"][:: max(1, steps // 20)], "bf16": found["bf16"][:: max(1, steps // 20)]}
    )


def _way(day: Day, model: str, way: str, apart: float) -> Answer:
    """Compare a short run in this mode with a plain one; report if this machine does not support the mode."""
    if day.small and way == "--compile":
        return Answer(None, {"not_to_be_had": "a compiler takes longer than a small day"})
    more = f"{'--dtype bf16' if day.on_gpu else ''} {RATES.get(model, '')} "
    steps = SMALL_STEPS if day.small else WAY_STEPS
    try:
        this = _losses(day, model, more + way, steps)
    except MegaparError as error:
        return Answer(None, {"not_to_be_had": str(error)[:300]})
    plain = _losses(day, model, more, steps)
    return Answer(
        abs(this[-1] - plain[-1]) <= apart * plain[-1],
        {"loss": this[-1], "plain": plain[-1], "allowed": apart, "losses": this, "plain_losses": plain},
    )


def _losses(day: Day, model: str, more: str, steps: int) -> list[float]:
    config = parsed(flags(day, model, more), model)
    with trainer(config, day.device, learnable=model != "ernie") as made:
        return losses(made, steps)
