"""Step time and MFU on one H200, predicted from the operators that a trace counts. Needs no GPU.

    python -m benchmarks.gpu_model.run [--layer "dense" "experts, dropless"] [--findings FILE] [--operators 15]

Prints the inputs with their sources, a table per layer of ``scripts/trace_cuda_budgets.py``, and one line of JSON.
``--findings`` names a measured day of ``scripts/gpu_day.sh``, whose figures replace inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.gpu_model.inputs import MIDDLE, WAYS, Inputs, read, with_findings
from benchmarks.gpu_model.model import DEPTHS, GPU, Counted, Gpu, of_a_layer, totals
from benchmarks.support.table import print_json, print_table

ROOT = Path(__file__).parents[2]
# Layers -> depth of the model that they are from: a dense 8B decoder; ERNIE 4.5 21B, all of whose layers have experts.
MODELS: Mapping[str, int] = {"dense": 32, "experts, dropless": 28}
MILLI = 1e3


def count(names: Sequence[str]) -> list[Counted]:
    """Return the traced operators; none if this machine cannot build the stub of CUDA, whose reason is printed."""
    line = [str(ROOT / "scripts/with_fake_cuda.sh"), "gpu_model", "-m", "benchmarks.gpu_model.count", *names]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the trace ended with status {done.returncode}: {done.stderr[-2000:]}")
    lines = done.stdout.splitlines()
    print("\n".join(line for line in lines if not line.startswith("{")), end="")
    return [Counted.from_dict(json.loads(line)) for line in lines if line.startswith("{")]


def print_inputs(inputs: Inputs) -> None:
    """Print every input with its source."""
    rows = []
    for name, figure in inputs.items():
        values = (f"{value:.4g}" for value in figure.values)
        rows.append((name, *values, figure.unit, figure.what, figure.source, figure.date))
    print_table(("input", *WAYS, "unit", "of", "source", "date"), rows)


def report(counted: Counted, inputs: Inputs) -> dict[str, object]:
    """Print the prediction of a layer, and return it."""
    few, layer, depth = totals(counted.few), of_a_layer(counted), MODELS.get(counted.name, 1)
    kernels, moved = (few[name] - DEPTHS[0] * layer[name] for name in ("kernels", "bytes"))
    print(
        f"{counted.name}: {layer['kernels']} kernels, {layer['bytes'] / 1e9:.1f} GB outside products, "
        f"{layer['gemms']} products, {layer['waits']} waits; beside the layers {kernels} kernels, {moved / 1e9:.1f} GB"
    )
    rows, ways, parts = [], {}, list[str]()
    for way in WAYS:
        gpu = Gpu(inputs, way)
        found = gpu.predict(counted)
        parts = list(found.device)
        seconds, mfu = gpu.step(counted, depth)
        ways[way] = {**asdict(found), "step_seconds": seconds, "step_mfu": mfu}
        times = (found.layer_seconds, *found.device.values(), found.host_seconds, found.beside_seconds, seconds)
        rows.append((way, *(f"{MILLI * value:.2f}" for value in times), f"{found.layer_mfu:.1%}", f"{mfu:.1%}"))
    header = ("inputs", "layer ms", *parts, "host", "beside ms", f"step of {depth} layers ms", "MFU layer", "MFU step")
    print_table(header, rows)
    return {"layers": depth, "layer": layer, "predicted": ways}


def print_operators(counted: Counted, inputs: Inputs, number: int) -> None:
    """Print the operators of a layer that take the most device time, with the inputs in the middle."""
    gpu, seconds, kernels = Gpu(inputs, MIDDLE), defaultdict[str, float](float), Counter[str]()
    for sign, operations in ((1, counted.more), (-1, counted.few)):
        for operation in operations:
            seconds[operation.name] += sign * sum(gpu.parts(operation).values())
            kernels[operation.name] += sign * operation.kernels
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:number]
    rows = [(name, str(kernels[name]), f"{MILLI * seconds[name]:.2f}") for name in slowest]
    print_table(("operator", "kernels", "device ms"), rows)


def _commit() -> str:
    line = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    """Count, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", nargs="+", default=list(MODELS), help="names of scripts/trace_cuda_budgets.py")
    parser.add_argument("--findings", type=Path, help="findings.jsonl of a measured day")
    parser.add_argument("--operators", type=int, default=0, help="also list this many operators of a layer")
    options = parser.parse_args()
    if any("compiled" in name for name in options.layer):
        parser.error("compiled layers are not built: the trace of a lowered function does not tell attention's FLOPs")
    inputs = read() if options.findings is None else with_findings(read(), options.findings)
    print_inputs(inputs)
    found = {}
    for counted in count(options.layer):
        found[counted.name] = report(counted, inputs)
        if options.operators:
            print_operators(counted, inputs, options.operators)
    if found:
        facts = {"date": datetime.now(timezone.utc).date().isoformat(), "commit": _commit(), "device": GPU}
        figures = {name: asdict(figure) for name, figure in inputs.items()}
        print_json({"benchmark": "gpu_model", **facts, "inputs": figures, "found": found})


if __name__ == "__main__":
    main()
