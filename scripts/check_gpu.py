"""For a machine with a GPU: one command that runs there what other machines can only trace. About 5 minutes.

    python scripts/check_gpu.py [--iters 20] [--layers 8]

Trains a small decoder, its mixture of experts and ERNIE plainly, with --compile and with --fp8, prints losses beside
each other, tokens/s, MFU, memory and allocation retries, and ends with a JSON line. Losses that are further apart than
rounding explains are named, with status 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
SIZES = "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --micro-batch-size 4"
COMMON = f"{SIZES} --data-path mock --device cuda --eval-interval 0 --log-interval 5 --lr 1e-4"
DENSE = f"{COMMON} --num-experts 0 --num-query-groups 4 --ffn-hidden-size 5632"
MOE = f"{COMMON} --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 1408 --num-query-groups 4"
ERNIE = f"{COMMON} --ffn-hidden-size 8192 --hidden-dropout 0 --attention-dropout 0"
MODELS = {"dense": ("pretrain_moe.py", DENSE), "moe": ("pretrain_moe.py", MOE), "ernie": ("pretrain_ernie.py", ERNIE)}
# How far the loss of the last step may be from the plain run's.
WAYS = {"plain": ("", 0.0), "compile": ("--compile", 0.02), "fp8": ("--fp8", 0.05), "gc": ("--manual-gc", 0.005)}


def main() -> int:
    """0 all ran and agree, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    asked = parser.parse_args()
    results, wrong = [], 0
    for model, (script, flags) in MODELS.items():
        plain = float("nan")
        for way, (more, tolerance) in WAYS.items():
            line = [script, *flags.split(), *more.split(), "--train-iters", str(asked.iters)]
            found = run([*line, "--num-layers", str(asked.layers)])
            plain = found.get("loss", plain) if way == "plain" else plain
            fits = "loss" in found and (way == "plain" or abs(found["loss"] - plain) <= tolerance * plain)
            wrong += not fits
            print(f"{model:6} {way:8} {'ok   ' if fits else 'WRONG'} {found}", flush=True)
            results.append({"model": model, "way": way, "ok": fits, **found})
    print(json.dumps({"wrong": wrong, "results": results}))
    return int(wrong > 0)


def run(line: list[str]) -> dict[str, float]:
    """Figures of one run; its last lines where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, *line, "--metrics-jsonl", str(metrics)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            print("\n".join((done.stdout + done.stderr).splitlines()[-8:]), file=sys.stderr)
            return {"status": done.returncode}
        records = [json.loads(text) for text in metrics.read_text().splitlines()]
    late = records[len(records) // 2 :]
    return {
        "loss": round(records[-1]["loss"], 4),
        "tokens_per_second": round(median(record["tokens_per_second"] for record in late)),
        "mfu": round(median(record["mfu"] for record in late), 4),
        "peak_gib": round(records[-1]["peak_memory_bytes"] / 2**30, 2),
        "unused_gib": round((records[-1]["reserved_unused_bytes"] or 0) / 2**30, 2),
        "allocation_retries": records[-1]["allocation_retries"] or 0,
    }


if __name__ == "__main__":
    sys.exit(main())
