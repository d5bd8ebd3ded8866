"""Loss curves with and without recompute: GPT-117M, reduced, at mp 2 x pp 2 and dp 2 x mp 2 x pp 2.

    python -m benchmarks.recompute.curves [--dtypes fp64 bf16 fp16] [--steps 100] [--device cpu|cuda] [--out FOLDER]

Equal curves are one line: the figure draws the run without recompute as a broad band, and the other as a thin line on
it. The table also has the memory that is held after the last step relative to what is in use (on an accelerator), or
the growth of the process since its tenth step (on a CPU). A call adds its layouts and dtypes to those in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recompute.curves_rank import SETTLED
from benchmarks.support.contest import Contest, Figures, Rank
from benchmarks.support.picture import Curve, draw_panels
from benchmarks.support.table import machine, print_json, print_table

LAYOUTS = {
    "mp 2 x pp 2": (4, ("--mp-degree", "2", "--pp-degree", "2")),
    "dp 2 x mp 2 x pp 2": (
        8,
        ("--mp-degree", "2", "--pp-degree", "2", "--sharding-degree", "1", "--hybrid-dp"),
    ),
}
WAYS = {"none": (), "recompute": ("--recompute-interval", "1")}
REDUCED = (
    *("--num-layers", "4", "--hidden-size", "96", "--num-attention-heads", "4", "--ffn-hidden-size", "384"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--vocab-size", "512"),
    *("--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "2e-3", "--min-lr", "2e-4"),
    *("--lr-warmup-iters", "5"),
)
RESULTS = Path(__file__).parent / "results"
DRAWN = ("bf16", "fp16")


def main() -> None:
    """Train, and save, compare and draw the results together with those of earlier calls in ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="*", default=["fp64", "bf16", "fp16"], help="none: only draw")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.steps <= SETTLED:
        parser.error(f"--steps is more than {SETTLED}, behind which growth is measured")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"curves-{options.device}.json"
    runs: dict[str, dict[str, Figures]] = json.loads(path.read_text())["runs"] if path.exists() else {}
    for layout in options.layouts if options.dtypes else ():
        for name, ways in _train(layout, options.dtypes, options.steps, options.device):
            runs[name] = ways
            path.write_text(json.dumps({"machine": machine(options.device), "runs": runs}, sort_keys=True) + "\n")
    print(f"{machine(options.device)}; GPT-117M reduced to 4 layers of 96\n")
    held = "resident: last / tenth step" if options.device == "cpu" else "reserved / allocated"
    header = ("run", "steps", "first loss", "last, none", "last, recompute", "losses that differ")
    print_table((*header, f"{held}, none", "recompute"), [_row(name, runs[name]) for name in sorted(runs)])
    panels = {dtype: [name for name in sorted(runs) if name.endswith(dtype)] for dtype in DRAWN}
    if all(panels.values()):
        curves = {
            f"{dtype}: loss by step": [
                Curve(f"{name.removesuffix(', ' + dtype)}, {way}", tuple(_losses(runs[name][way])), way == "none")
                for name in names
                for way in WAYS
            ]
            for dtype, names in panels.items()
        }
        draw_panels(curves, options.out / f"curves-{options.device}.png")
    rows = [_row(name, ways) for name, ways in runs.items()]
    print_json({"benchmark": "recompute curves", "machine": machine(options.device), "table": rows})


def _row(name: str, ways: dict[str, Figures]) -> tuple[str, ...]:
    """Return a line of the table: one layout in one dtype."""
    plain, again = (_losses(ways[way]) for way in WAYS)
    differ = sum(a != b for a, b in zip(plain, again, strict=True))
    ratios = [f"{ways[way]['held_ratio']:.3f}" for way in WAYS]
    losses = (f"{plain[0]:.4f}", f"{plain[-1]:.4f}", f"{again[-1]:.4f}")
    return (name, str(len(plain)), *losses, f"{differ} of {len(plain)}", *ratios)


def _train(layout: str, dtypes: list[str], steps: int, device: str) -> Iterator[tuple[str, dict[str, Figures]]]:
    """Yield (run, way -> figures) of every dtype with and without recompute on one layout, on the same ranks."""
    world_size, flags = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "benchmarks.recompute.curves_rank", "--device", device, "--steps", str(steps)]
        argv += ["--rendezvous", f"file://{Path(folder) / 'meet'}", "--", *REDUCED, *flags]
        places = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size))
        shared = {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
        with Contest({"ranks": [Rank(argv, {**place, **shared}) for place in places]}) as contest:
            for dtype in dtypes:
                ways = {way: contest.turn("ranks", " ".join((dtype, *more))) for way, more in WAYS.items()}
                yield f"{layout}, {dtype}", ways


def _losses(figures: Figures) -> list[float]:
    """Return the losses in the order of the steps."""
    return [figures[name] for name in sorted(figures) if name.startswith("loss")]


if __name__ == "__main__":
    main()
