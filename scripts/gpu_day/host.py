"""Host time of a training step: from an idle device until ``step()`` returns, by tokens and width.

A step in which this is longer than the device's work is limited by the host. The operators of a layer are the
difference between two depths.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

from megapar.trainer import Trainer
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.kernels import profiled_step
from scripts.gpu_day.trainers import flags, parsed, trainer

LAYERS, FEWER = 4, 2
STEPS = 5
TOKENS = {16384: "--seq-length 4096 --micro-batch-size 4", 4096: "--seq-length 4096 --micro-batch-size 1"}
TOKENS |= {1024: "--seq-length 1024 --micro-batch-size 1"}
HEADS = {  # by hidden size
    2048: "--num-attention-heads 16 --num-query-groups 16",
    1024: "--num-attention-heads 8 --num-query-groups 8",
}
WIDTHS = {"dense": "--ffn-hidden-size", "moe": "--moe-ffn-hidden-size"}
FACTORS = {"dense": 3.0, "moe": 0.75}  # of the hidden size


def run(day: Day) -> None:
    """Time every size, then count the operators."""
    few = 1 if day.small else None
    for hidden, heads in list(HEADS.items())[:few]:
        for tokens, lengths in list(TOKENS.items())[:few]:
            for model, width in WIDTHS.items():
                more = f"--hidden-size {hidden} {heads} {width} {int(FACTORS[model] * hidden)} {lengths}"
                day.attempt(f"{model}, h {hidden}, {tokens} tokens", partial(timed, day, model, more), least=2.0)
    for model in ("dense", "moe"):
        day.attempt(f"operators of a layer, {model}", partial(operators, day, model), least=3.0)


def timed(day: Day, model: str, more: str) -> Answer:
    """Return the medians of the host's and of all seconds of a step."""
    config = parsed(flags(day, model, f"--num-layers {LAYERS} {'' if day.small else more}"), model)
    with trainer(config, day.device) as made:
        for _ in range(1 if day.small else 3):
            made.monitor.add(made.step())
        pairs = [_step(day, made) for _ in range(2 if day.small else STEPS)]
    host, whole = (median(seconds) for seconds in zip(*pairs, strict=True))
    figures = {"host_seconds": host, "seconds": whole, "host_share": host / whole, "layers": LAYERS}
    return day.figures(figures, "a CPU computes in the host's time")


def _step(day: Day, made: Trainer) -> tuple[float, float]:
    day.synchronize()
    began = time.perf_counter()
    record = made.step()
    returned = time.perf_counter()
    day.synchronize()
    ended = time.perf_counter()
    made.monitor.add(record)
    return returned - began, ended - began


def operators(day: Day, model: str) -> Answer:
    """Return the calls of torch's operators in a step per layer, and beside the layers."""
    length = "" if day.small else "--seq-length 1024"
    many, few = (profiled_step(day, model, f"--num-layers {layers} {length}") for layers in (LAYERS, FEWER))
    more = many.calls - few.calls
    of_layer = {name: calls / (LAYERS - FEWER) for name, calls in more.most_common(25)}
    total = (many.calls.total() - few.calls.total()) / (LAYERS - FEWER)
    figures: dict[str, Any] = {"operators_of_a_layer": total, "beside": many.calls.total() - LAYERS * total}
    return Answer(None, {**figures, "most_called": of_layer})
