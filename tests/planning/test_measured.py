"""Plans of steps that an H200 has run: their peak of memory within 5 %, their time within 6 %.

No constant of the memory is fitted to these runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.throughput.ours_rank import flags
from benchmarks.throughput.shape import find
from megapar.arguments import parse
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan

RESULTS = Path("benchmarks/throughput/results/2026-11-26-h200.jsonl")
MODEL_TYPES = {"dense": "ernie4_5", "moe": "ernie4_5_moe", "ernie": "ernie"}


@pytest.mark.parametrize("model", ["dense", "moe", "ernie"])
def test_a_plan_is_what_an_h200_needed(model: str, tmp_path: Path) -> None:
    lines = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    measured = next(one for one in lines if (one["model"], one["contestant"]) == (model, "megapar"))
    shape = find("cuda", model)
    folder = {**shape.config, "architectures": [shape.architecture], "model_type": MODEL_TYPES[model]}
    layers = {"moe_layer_end_index": folder["num_hidden_layers"] - 1, "moe_layer_interval": 1} if model == "moe" else {}
    (tmp_path / "config.json").write_text(json.dumps({**folder, **layers}), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()  # a plan reads no weights
    plan = Plan(parse(shape.kind, flags(shape, tmp_path, "cuda", "bf16", 1), {}), device_kind("h200"))
    peak, seconds = (median(one[name] for one in measured["rounds"]) for name in ("peak_bytes", "seconds"))
    assert plan.fullest.peak == pytest.approx(peak, rel=0.05)
    assert plan.speed.step_seconds == pytest.approx(seconds, rel=0.06)
