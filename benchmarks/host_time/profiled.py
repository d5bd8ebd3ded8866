"""Functions in which a layer's host time goes: the difference of two profiles of megapar's step, at 6 and 2 layers.

    python -m benchmarks.host_time.profiled [--model moe] [--steps 200] [--functions 30]

Times are of the processor. cProfile makes calls of Python functions slower and leaves operators as they are, so that
their shares of a step without a profiler are smaller.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import tempfile
import time
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch

from benchmarks.host_time.contestant import make_ours
from benchmarks.host_time.run import DEPTHS, MICRO, MODELS
from benchmarks.support.table import print_table
from benchmarks.throughput.prepare import write
from benchmarks.throughput.shape import shallow

ROOT = Path(__file__).parents[2]
WARMUP = 20


class Cost(NamedTuple):
    """Cost of one function in a step: calls, its seconds without and with the functions that it calls."""

    calls: float
    own: float
    whole: float


def profile(model: str, layers: int, steps: int) -> dict[str, Cost]:
    """Return the functions of a step."""
    with tempfile.TemporaryDirectory() as folder:
        shape = shallow(model, layers)
        write(shape, "cpu", Path(folder))
        trainer = make_ours(shape, Path(folder))
        for _ in range(WARMUP):
            trainer.step()
        profiler = cProfile.Profile(time.thread_time)
        profiler.enable()
        for _ in range(steps):
            trainer.step()
        profiler.disable()
        trainer.loader.close()
    found: dict[str, Cost] = {}
    for entry in profiler.getstats():
        name = _name(entry.code)
        old = found.get(name, Cost(0, 0, 0))
        own, whole = entry.inlinetime / steps, entry.totaltime / steps
        found[name] = Cost(old.calls + entry.callcount / steps, old.own + own, old.whole + whole)
    return found


def _name(code: CodeType | str) -> str:
    if isinstance(code, str):  # built in
        return code
    place = code.co_filename.removeprefix(f"{ROOT}{os.sep}").rpartition("site-packages/")[2]
    return f"{place}:{code.co_firstlineno} {code.co_name}"


def main() -> None:
    """Print the functions of a layer by own time, and by time with what they call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="moe")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--functions", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    few, more = (profile(options.model, layers, options.steps) for layers in DEPTHS)
    depth = DEPTHS[1] - DEPTHS[0]
    layer = {
        name: Cost(*((a - b) / depth for a, b in zip(cost, few.get(name, Cost(0, 0, 0)), strict=True)))
        for name, cost in more.items()
    }
    for order in ("own", "whole"):
        most = sorted(layer.items(), key=lambda item: -float(getattr(item[1], order)))[: options.functions]
        total = MICRO * sum(x.own for x in layer.values())
        print(f"{options.model}: a layer and step by {order} time; sum of own {total:.0f}")
        rows = [(f"{MICRO * x.own:.0f}", f"{MICRO * x.whole:.0f}", f"{x.calls:.1f}", name) for name, x in most]
        print_table(("own us", "whole us", "calls", "function"), rows)


if __name__ == "__main__":
    main()
