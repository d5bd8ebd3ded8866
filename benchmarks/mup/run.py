"""A coordinate check of --mup-base-hidden-size, and the best learning rates of a narrow and of a wide model.

    python -m benchmarks.mup.run coordinates [--picture FILE]    a minute; widths 64 to 512, with muP and without
    python -m benchmarks.mup.run transfer [--kept FILE]          7 rates, 3 seeds, widths 128 and 512; under 30 minutes

coordinates: after a few steps on one sequence, the root mean square of how far each output moved, at every width. Its
slope is that of log2(change) over log2(width): 0 if features learn alike at every width.
transfer: the mean loss of the last tenth of the steps for each rate, and the best rate of each width. FILE keeps the
loss of each run, so that the same command goes on where it was cut.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.chains import LENGTH, WORDS, Chains
from benchmarks.support.table import machine, print_json, print_table
from megapar.arguments import parse
from megapar.data.own_data import OwnData
from megapar.model.decoder.model import LmHead
from megapar.trainer import train
from megapar.training.loop.callbacks import TrainerCallback

HEAD = 32
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("--optimizer", "adamw", "--lr", "2e-3"),
    "muon spectral": ("--optimizer", "muon", "--lr", "2e-3", "--muon-extra-scale-factor", "0.2"),
    "muon unit_rms_norm": ("--optimizer", "muon", "--lr", "2e-2", "--muon-scale-mode", "unit_rms_norm"),
    "sgd": ("--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "0.1"),
}
RATES = tuple(2.0**-power for power in range(11, 4, -1))  # a factor of 2 apart


def flags_of(width: int, base: int, batch: int, steps: int) -> list[str]:
    """Return the flags of a decoder of this width. base: --mup-base-hidden-size; 0 for a plain one."""
    return [
        *("--num-layers", "2", "--hidden-size", str(width), "--num-attention-heads", str(width // HEAD)),
        *("--ffn-hidden-size", str(2 * width), "--seq-length", str(LENGTH), "--vocab-size", str(WORDS)),
        *("--num-experts", "0", "--untie-embeddings-and-output-weights", "--init-std", "0.08", "--dtype", "fp32"),
        *("--global-batch-size", str(batch), "--micro-batch-size", str(batch), "--train-iters", str(steps)),
        *("--eval-interval", "0", "--log-interval", str(10**6), "--device", "cpu", "--device-tflops", "1"),
        *("--mup-base-hidden-size", str(base)),
    ]


class Outputs(TrainerCallback):
    """Keeps the outputs of embedding, attention, MLPs and head in each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def begin(self, trainer: Any) -> None:
        """Watch the modules of the model."""
        for name, module in trainer.job.model.named_modules():
            if name == "embedding" or name.rpartition(".")[2] in ("attention", "mlp") or isinstance(module, LmHead):
                module.register_forward_hook(self._keep(name))

    def before_step(self, iteration: int) -> None:
        """Begin with the outputs of a step."""
        self.steps.append({})

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            with torch.no_grad():
                kept = module.logits(inputs[0][0], None) if isinstance(module, LmHead) else output
            self.steps[-1]["logits" if isinstance(module, LmHead) else name] = kept.detach().clone()

        return hook


def changes(width: int, base: int, optimizer: Sequence[str], steps: int) -> dict[str, float]:
    """Return the root mean square of how far each output moved in ``steps`` steps on one sequence."""
    outputs, schedule = Outputs(), ("--lr-decay-style", "constant", "--weight-decay", "0", "--clip-grad", "0")
    config = parse("moe", [*flags_of(width, base, 1, steps + 1), *optimizer, *schedule])
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, data=OwnData("one-chain", train=Chains(1)), callbacks=[outputs])
    first, last = outputs.steps[0], outputs.steps[-1]
    return {name: (last[name] - first[name]).square().mean().sqrt().item() for name in first}


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of log2(value) over log2(width), by least squares."""
    return statistics.linear_regression([math.log2(w) for w in widths], [math.log2(v) for v in values]).slope


def coordinates(names: Sequence[str], widths: Sequence[int], steps: int) -> dict[str, dict[str, list[float]]]:
    """Return, by optimizer with and without muP, how far each output moved at each width."""
    found = {}
    for name in names:
        for base, way in ((widths[0], "muP"), (0, "plain")):
            rows = [changes(width, base, OPTIMIZERS[name], steps) for width in widths]
            found[f"{name}, {way}"] = {output: [row[output] for row in rows] for output in rows[0]}
    return found


def loss(width: int, base: int, rate: float, seed: int, steps: int, batch: int) -> float:
    """Return the mean loss of the last tenth of the steps of a run."""
    flags = (
        *("--lr", str(rate), "--seed", str(seed), "--lr-warmup-iters", str(steps // 10), "--lr-decay-style", "linear"),
    )
    config = parse("moe", [*flags_of(width, base, batch, steps), *flags])
    with contextlib.redirect_stdout(io.StringIO()):
        records = train(config, data=OwnData("chains", train=Chains(steps * batch)), keep_records=True).records
    return statistics.fmean(record.loss for record in records[-max(1, steps // 10) :])


class KeptLosses:
    """Losses of runs by their arguments, in a file to which each new one is added. None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def get(self, run: tuple[float, ...], make: Callable[[], float]) -> float:
        """Return the loss of a run, which is made if the file lacks it."""
        if self._path is None:
            return make()
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        known = {tuple(line["run"]): float(line["loss"]) for line in map(json.loads, lines)}
        if run not in known:
            known[run] = make()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"run": run, "loss": known[run]}) + "\n")
        return known[run]


def transfer(
    widths: Sequence[int],
    rates: Sequence[float],
    seeds: int,
    steps: int,
    batch: int,
    *,
    plain: bool = False,
    kept: KeptLosses | None = None,
) -> dict[int, list[list[float]]]:
    """Return the losses by width, rate and seed; the first width is that of the base. plain: without muP."""
    kept, base = kept or KeptLosses(None), 0 if plain else widths[0]

    def one(*run: Any) -> float:
        return kept.get(run, lambda: loss(*run))

    return {
        width: [[one(width, base, rate, seed, steps, batch) for seed in range(1, seeds + 1)] for rate in rates]
        for width in widths
    }


def best(losses: Sequence[Sequence[float]]) -> int:
    """Return the number of the rate with the lowest mean loss."""
    means = [statistics.fmean(each) for each in losses]
    return means.index(min(means))


def picture(widths: Sequence[int], found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return a coordinate check as SVG: for each way, the change of each output over the width, both on log scales."""
    colors, size = ("#4c78a8", "#e0803c", "#59a14f", "#b07aa1", "#edc948", "#76b7b2"), 190
    logs = [math.log2(value) for outputs in found.values() for values in outputs.values() for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    parts = []
    for number, (way, outputs) in enumerate(found.items()):
        left, top = 20 + (number % 4) * (size + 30), 30 + number // 4 * (size + 50)
        parts.append(f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="#bbbbbb"/>')
        parts.append(f'<text x="{left}" y="{top - 6}">{way}</text>')
        for color, (name, values) in zip(colors, outputs.items(), strict=False):
            step = size / max(1, len(widths) - 1)
            points = " ".join(
                f"{left + n * step:.1f},{top + size * (high - math.log2(value)) / (high - low):.1f}"
                for n, value in enumerate(values)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"><title>{name}</title></polyline>')
    rows = -(-len(found) // 4)
    bottom = 30 + rows * (size + 50)
    for number, (name, color) in enumerate(zip(next(iter(found.values())), colors, strict=False)):
        parts.append(f'<text x="{20 + number * 150}" y="{bottom}" fill="{color}">{name}</text>')
    scales = f"across: width {widths[0]} to {widths[-1]}; up: change from 2^{low} to 2^{high}, log scales"
    parts.append(f'<text x="20" y="{bottom + 18}">{scales}</text>')
    box = f'width="{4 * (size + 30) + 10}" height="{bottom + 30}" font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}><rect width="100%" height="100%" fill="white"/>\n' + (
        "\n".join(parts) + "\n</svg>\n"
    )


def _coordinates(options: argparse.Namespace) -> dict[str, object]:
    widths = options.widths or [64, 128, 256, 512]
    found = coordinates(list(OPTIMIZERS), widths, options.steps or 5)
    names = list(next(iter(found.values())))
    print_table(
        ("slope", *names),
        [(way, *(f"{slope(widths, outputs[name]):+.2f}" for name in names)) for way, outputs in found.items()],
    )
    if options.picture:
        Path(options.picture).write_text(picture(widths, found))
    return {"widths": widths, "changes": found}


def _transfer(options: argparse.Namespace) -> dict[str, object]:
    widths, steps = options.widths or [128, 512], options.steps or 150
    kept = KeptLosses(options.kept)
    found = transfer(widths, RATES, options.seeds, steps, batch=8, plain=options.plain, kept=kept)
    print_table(
        ("width", *(f"{rate:.2g}" for rate in RATES), "best"),
        [
            (str(width), *(f"{statistics.fmean(each):.3f}" for each in losses), f"{RATES[best(losses)]:.2g}")
            for width, losses in found.items()
        ],
    )
    chosen = [best(losses) for losses in found.values()]
    print(f"best rates {'are neighbours or equal' if max(chosen) - min(chosen) <= 1 else 'DIFFER'}")
    return {"widths": widths, "rates": RATES, "steps": steps, "losses": found, "best": chosen, "plain": options.plain}


def main() -> None:
    """Measure, print a table and one line of JSON. Exit status 1 if the best rates are not neighbours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("coordinates", "transfer"))
    parser.add_argument("--widths", type=int, nargs="+", help="multiples of 32, the base first")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="transfer: without muP")
    kept = Path("build", "mup", "losses.jsonl")
    parser.add_argument("--kept", type=Path, default=kept, help=f"transfer: the file of losses, by default {kept}")
    parser.add_argument("--picture", help="coordinates: write this SVG file")
    options = parser.parse_args()
    result = _coordinates(options) if options.part == "coordinates" else _transfer(options)
    print_json({"benchmark": f"mup {options.part}", "machine": machine("cpu"), **result})
    chosen = result.get("best", [0])
    assert isinstance(chosen, list)
    raise SystemExit(options.part == "transfer" and not options.plain and max(chosen) - min(chosen) > 1)


if __name__ == "__main__":
    main()
