"""Losses of a small decoder with optimizer state in two bytes, against state in fp32; broken roundings must differ.

    python -m benchmarks.precision.run [--steps 400] [--at-once 2] [--only NAME ..] [--folder FOLDER]

Ten runs of the same steps, each in a process of one thread. FOLDER keeps the losses and a checkpoint of each, so that
the same command goes on where it was cut. Then, if all runs are there, it prints a table and a line of JSON: the
difference of the mean loss of the last quarter from that of the first run, which may be 3 times that of the run with
another order of sums, or 0.2 % of the loss. Status 1 if a technique differs more, or a broken rounding less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.support.chains import LENGTH, WORDS, Chains
from benchmarks.support.table import machine, print_json, print_table
from megapar.arguments import parse
from megapar.core.device.remainders import split_master
from megapar.data.batches import Loader
from megapar.data.own_data import OwnData
from megapar.trainer import train

ROOT = Path(__file__).parents[2]
MICRO_BATCHES = 32
TIMES, SHARE = 3, 0.002  # of the difference of another order of sums; of the loss
SAVED_EVERY = 50  # steps
SHAPE = (
    *("--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "2", "--ffn-hidden-size", "128"),
    *("--seq-length", str(LENGTH), "--vocab-size", str(WORDS), "--num-experts", "0", "--init-std", "0.08"),
    *("--dtype", "bf16", "--device", "cpu", "--device-tflops", "1"),
)
GRADIENTS = ("--main-grads-dtype", "bf16")
MOMENTS = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
REMAINDERS = ("--store-param-remainders",)
UPDATE = "megapar.core.device.adamw"


@dataclass(frozen=True)
class Variant:
    """One run.

    Attributes:
        kind: ``reference``, ``noise`` (what differs without a technique), ``technique`` or ``broken``.
        change: Returns a context in which the code differs.
    """

    kind: str
    flags: tuple[str, ...] = ()
    change: Callable[[], AbstractContextManager[Any]] = nullcontext


def _reversed() -> AbstractContextManager[Any]:
    """Sum the gradients of a step from its last micro-batch to its first."""
    step = Loader.step
    return patch.object(Loader, "step", lambda *args: list(step(*args))[::-1])


def _always(bits: int) -> AbstractContextManager[Any]:
    """Round moments with the same random bits each time: 0 truncates, -1 rounds up in magnitude."""
    return patch(f"{UPDATE}.random_bits", lambda key, update, index: torch.full_like(index, bits))


def _nearest(master: Tensor) -> tuple[Tensor, Tensor]:
    weights, remainders = split_master(master)
    return weights, torch.zeros_like(remainders)


REFERENCE, ORDER, SEED = "fp32 state", "another order of sums", "another seed"
VARIANTS: Mapping[str, Variant] = {
    REFERENCE: Variant("reference"),
    ORDER: Variant("noise", change=_reversed),
    SEED: Variant("noise", ("--seed", "2")),
    "bf16 main gradients": Variant("technique", GRADIENTS),
    "bf16 moments": Variant("technique", MOMENTS),
    "remainders": Variant("technique", REMAINDERS),
    "all together": Variant("technique", (*GRADIENTS, *MOMENTS, *REMAINDERS)),
    "moments truncated": Variant("broken", MOMENTS, lambda: _always(0)),
    "moments rounded up": Variant("broken", MOMENTS, lambda: _always(-1)),
    "masters without remainders": Variant("broken", REMAINDERS, lambda: patch(f"{UPDATE}.split_master", _nearest)),
}


def flags_of(steps: int, micro_batches: int) -> list[str]:
    """Return the flags of all runs. The learning rate falls to zero."""
    return [
        *SHAPE,
        *("--micro-batch-size", "1", "--global-batch-size", str(micro_batches), "--train-iters", str(steps)),
        *("--lr", "1e-3", "--min-lr", "0", "--lr-decay-style", "linear", "--lr-warmup-iters", str(steps // 20)),
        *("--adam-beta2", "0.999", "--eval-interval", "0", "--log-interval", "10"),
    ]


def run(name: str, folder: Path, steps: int, micro_batches: int) -> None:
    """Train a variant to the end, from its last checkpoint in the folder if there is one."""
    variant, saved = VARIANTS[name], str(folder / name.replace(" ", "-"))
    state = ("--save", saved, "--load", saved, "--save-interval", str(SAVED_EVERY), "--keep", "1")
    line = [*flags_of(steps, micro_batches), *state, "--metrics-jsonl", f"{saved}.jsonl", *variant.flags]
    with variant.change():
        train(parse("moe", line), data=OwnData("chains", train=Chains(steps * micro_batches)))


def losses(name: str, folder: Path) -> list[float]:
    """Return the loss of each step that a variant's file has, the last one of a repeated step."""
    path = folder / f"{name.replace(' ', '-')}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = {record["iteration"]: float(record["loss"]) for record in map(json.loads, lines)}
    return [found[step] for step in sorted(found)]


def complete(names: Sequence[str], folder: Path, steps: int, micro_batches: int, at_once: int) -> None:
    """Run the variants whose files lack steps, each in its process."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def one(name: str) -> None:
        line = [sys.executable, "-m", "benchmarks.precision.run", "--run", name, "--folder", str(folder)]
        line += ["--steps", str(steps), "--micro-batches", str(micro_batches)]
        with (folder / f"{name.replace(' ', '-')}.log").open("a") as log:
            subprocess.run(line, cwd=ROOT, env=environ, stdout=log, stderr=log, check=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, [name for name in names if len(losses(name, folder)) < steps]))


def judge(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return the mean loss of each variant's last quarter, its difference from the reference, and what it may be.

    ``fails`` says whether the difference is larger, ``right`` whether that is as it should be.
    """
    ends = {name: statistics.fmean(values[-max(1, len(values) // 4) :]) for name, values in found.items()}
    differences = {name: abs(end - ends[REFERENCE]) for name, end in ends.items()}
    most = max(TIMES * differences[ORDER], SHARE * ends[REFERENCE])
    verdicts = {}
    for name, difference in differences.items():
        kind, fails = VARIANTS[name].kind, difference > most
        right = fails == (kind == "broken") if kind in ("technique", "broken") else None
        verdicts[name] = {"loss": ends[name], "difference": difference, "most": most, "fails": fails, "right": right}
    return verdicts


def main() -> int:
    """Run what is missing, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES)
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "precision")
    parser.add_argument("--run", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, size = options.folder, (options.steps, options.micro_batches)
    folder.mkdir(parents=True, exist_ok=True)
    if options.run:
        run(options.run, folder, *size)
        return 0
    complete(options.only, folder, *size, options.at_once)
    found = {name: losses(name, folder) for name in VARIANTS}
    if missing := [name for name, values in found.items() if len(values) < options.steps]:
        print(f"still to run: {', '.join(missing)}")
        return 0
    verdicts = judge(found)
    words = {True: "as it should", False: "WRONG", None: ""}
    print_table(
        ("", "kind", "loss", "difference", "of what it may be", "fails", ""),
        [
            (
                *(name, VARIANTS[name].kind, f"{one['loss']:.4f}", f"{one['difference']:.5f}"),
                *(f"{one['difference'] / one['most']:.2f}", "yes" if one["fails"] else "no", words[one["right"]]),
            )
            for name, one in verdicts.items()
        ],
    )
    print_json(
        {
            **{"benchmark": "precision", "machine": machine("cpu"), "steps": options.steps},
            **{"micro_batches": options.micro_batches, "variants": verdicts, "losses": found},
        }
    )
    return 0 if all(one["right"] is not False for one in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
