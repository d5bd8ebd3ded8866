"""Tokens per second of a training step against transformers' own models, and against the sum of its kernels.

    python -m benchmarks.throughput.run [--device cpu|cuda] [--model NAME] [--dtype fp32|bf16] [--ranks N] [--rounds N]

Every contestant starts from the same weights and reads the same batches; the losses of the first step are compared.
One rank: transformers eager and under torch.compile. Two: under DDP and FSDP2. On a CPU the ranks share its cores and
take turns; on a GPU, whose memory would not hold them all, one runs after the other.

    python -m benchmarks.throughput.run --ranks 2 --model moe --peer deepspeed [--deepspeed-python VENV/bin/python]

compares with DeepSpeed-MoE; megapar also distributes its experts over the ranks then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import product
from pathlib import Path

from benchmarks.support.contest import Contest, Figures, Rank, median, paired
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.throughput.shape import SHAPES, Shape, find

HERE = "benchmarks.throughput"
OURS, LIMIT = "megapar", "sum of kernels"
PEERS = {
    ("cpu", 1): ("eager", "compile"),
    ("cpu", 2): ("ddp", "fsdp2"),
    ("cuda", 1): ("compile",),
    ("cuda", 2): ("fsdp2",),
}
DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16",)}
# megapar's flags, as a user would choose them on such a machine. Two ranks of one machine gain nothing from sharding in
# fp32: whole master weights are the parameters themselves, so that nothing is gathered or copied.
OWN_FLAGS = {("cpu", 2): "--hybrid-dp --sharding-degree 1", ("cuda", 1): "--compile", ("cuda", 2): "--compile"}
# megapar's flags for a peer that has experts on both ranks.
SHARED_EXPERTS = "--ep-degree 2"
DEEPSPEED = "deepspeed"
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # of the first step's loss, relative


def main() -> None:
    """Run the races, and print a table for each model and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument(
        "--model", action="append", help="ernie, moe; on cuda also dense; default: these; or tiny-dense, .."
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), action="append", help="default: fp32 and bf16; cuda: bf16")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", help="default: both of that many ranks; or deepspeed, by itself")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="the interpreter that has DeepSpeed")
    parser.add_argument(
        "--flags",
        action="append",
        help="more flags of ours, in one word; given again, ours races with these, too (default: OWN_FLAGS)",
    )
    parser.add_argument("--jsonl", type=Path, help="add a line per contestant to this file as soon as it has run")
    parser.add_argument("--minutes", type=float, help="begin no model that could end later; default: 7.5 on cuda")
    parser.add_argument("--no-limit", action="store_true", help="leave the sum of kernels out")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' experts: grouped_mm, batched_mm, eager")
    parser.add_argument("--folder", type=Path, help="keep weights and batches here, or find them here")
    options = parser.parse_args()
    if options.minutes is None:
        options.minutes = 7.5 if options.device == "cuda" else math.inf
    if DEEPSPEED in (options.peer or ()):
        _check_deepspeed(parser, options)
    result: dict[str, object] = {"benchmark": "throughput", "date": date.today().isoformat(), "commit": _commit()}
    result |= {"machine": machine(options.device), "ranks": options.ranks}
    print(f"{result['machine']}, ranks: {options.ranks}; {options.rounds} interleaved rounds\n")
    models = options.model or list(SHAPES[options.device])
    began, longest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        weights = options.folder or Path(folder)
        prepare(weights, options.device, models)
        for model, dtype in product(models, options.dtype or DTYPES[options.device]):
            before = time.monotonic() - began
            if before + longest > 60 * options.minutes:
                print(f"{model}, {dtype}: left out, {options.minutes:g} minutes would not do (--minutes, --model)\n")
                continue
            with tempfile.TemporaryDirectory() as meet:
                result[f"{model} {dtype}"] = Race(options, model, dtype, weights, Path(meet)).run()
            longest = max(longest, time.monotonic() - began - before)
    print_json(result)


def _commit() -> str:
    """Return the commit of this tree; "unknown" for a copy without its history."""
    line = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def prepare(folder: Path, device: str, models: Sequence[str]) -> None:
    """Prepare the missing weights and samples of all models in parallel."""
    running = []
    for model in models:
        place = folder / f"{device}-{model}"
        if not (place / "samples.pt").exists():
            line = [sys.executable, "-m", f"{HERE}.prepare", "--device", device, "--model", model, str(place)]
            running.append(subprocess.Popen(line))
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise SystemExit("the weights could not be made")


class Race:
    """One model in one precision."""

    def __init__(self, options: argparse.Namespace, model: str, dtype: str, weights: Path, meet: Path) -> None:
        self._options, self._model, self._dtype = options, model, dtype
        self._shape: Shape = find(options.device, model)
        self._meet = meet
        self._folder = weights / f"{options.device}-{model}"
        self._peers = options.peer or PEERS[options.device, options.ranks]

    def run(self) -> dict[str, object]:
        """Run the steps of all contestants, interleaved. The losses of the first ones are compared."""
        contestants = dict(self._contestants())
        first: dict[str, float] = {}
        times: dict[str, list[Figures]] = {}
        limit: Figures = {}
        alone = self._options.device == "cuda"
        for group in [[name] for name in contestants] if alone else [list(contestants)]:
            try:
                with Contest({name: contestants[name] for name in group}) as contest:
                    entries = {name: (name, "step") for name in group if name != LIMIT}
                    first |= {name: contest.turn(*entry)["loss"] for name, entry in entries.items()}
                    self._compare(first)
                    # On a CPU the first turn was the warmup.
                    times |= contest.rounds(self._options.rounds, entries, warmup=int(alone))
                    if LIMIT in group:
                        limit = contest.turn(LIMIT, "all")
                self._note(
                    {name: times[name] for name in group if name != LIMIT}, first, limit if LIMIT in group else {}
                )
            except RuntimeError as error:
                if not alone or group == [OURS]:
                    raise
                print(f"{self._model}, {self._dtype}: without {group[0]}: {error}\n")
        return self._tell(first, times, limit)

    def _note(
        self, times: Mapping[str, Sequence[Figures]], first: Mapping[str, float], limit: Mapping[str, float]
    ) -> None:
        """Append lines on the contestants that have just run, if there is a file for them."""
        if self._options.jsonl is None:
            return
        facts = {
            "model": self._model,
            "dtype": self._dtype,
            "device": self._options.device,
            "tokens": self._shape.tokens,
        }
        lines: list[dict[str, object]] = [
            {
                **facts,
                "contestant": name,
                "rounds": list(figures),
                "seconds": median(figures),
                "first_loss": first[name],
            }
            for name, figures in times.items()
        ]
        lines += [{**facts, "contestant": LIMIT, **limit}] if limit else []
        with self._options.jsonl.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _compare(self, first: Mapping[str, float]) -> None:
        for name, loss in first.items():
            if not math.isclose(loss, first[OURS], rel_tol=TOLERANCE[self._dtype]):
                raise SystemExit(f"{self._model} {self._dtype}: first loss of {name} is {loss}, ours {first[OURS]}")

    def _tell(
        self, first: Mapping[str, float], times: Mapping[str, Sequence[Figures]], limit: Mapping[str, float]
    ) -> dict[str, object]:
        tokens = self._shape.tokens
        seconds = {name: median(figures) for name, figures in times.items()}
        gigabytes = {name: max(f["peak_bytes"] for f in figures) / 1e9 for name, figures in times.items()}
        ratios = {name: paired(figures, times[OURS]) for name, figures in times.items() if name != OURS}
        print(f"{self._model}, {self._dtype}: {tokens} tokens a step; first loss {first[OURS]:.6f} for all\n")
        rows = [
            (name, f"{value:.3f}", f"{tokens / value:.0f}", f"{gigabytes[name]:.2f}", f"{ratios.get(name, 1.0):.2f}")
            for name, value in seconds.items()
        ]
        if limit:
            rows.append((LIMIT, f"{limit['seconds']:.3f}", f"{tokens / limit['seconds']:.0f}", "", ""))
        print_table(("", "seconds per step", "tokens/s", "peak GB", "speed of megapar to it"), rows)
        found: dict[str, object] = {
            "seconds": seconds,
            "peak_gigabytes": gigabytes,
            "speed_to": ratios,
            "first_loss": dict(first),
        }
        achieved = times[OURS][0]["flops"] / seconds[OURS] / self._options.ranks
        print(f"model FLOP/s of a rank: {achieved / 1e12:.4g} T", end="")
        if self._options.device == "cuda":  # on a CPU the peak is a large product's, which is measured here anyway
            found["mfu"] = achieved / times[OURS][0]["peak_flops"]
            print(f", MFU {found['mfu']:.1%}", end="")
        if limit:
            found |= {"kernels": dict(limit), "step_to_kernels": seconds[OURS] / limit["seconds"]}
            print(f", {achieved / limit['gemm_flops']:.1%} of a large product's")
            print(f"step to sum of kernels: {seconds[OURS] / limit['seconds']:.2f}; of it: {_groups(limit)}", end="")
        print("\n", flush=True)
        return {**found, "model_flops_per_second": achieved}

    def _contestants(self) -> Iterator[tuple[str, list[Rank]]]:
        options, numbers = self._options, range(self._options.ranks)
        common = ["--device", options.device, "--model", self._model, "--dtype", self._dtype, str(self._folder)]
        own = OWN_FLAGS.get((options.device, options.ranks), "")
        own = SHARED_EXPERTS if DEEPSPEED in self._peers else own
        for number, flags in enumerate([own] if options.flags is None else options.flags):
            name = f"{OURS} {flags or 'plain'}" if number else OURS
            yield (
                name,
                [self._rank(n, name.replace(" ", "_"), "ours_rank", [*common, "--", *flags.split()]) for n in numbers],
            )
        for kind in self._peers:
            if kind == DEEPSPEED:
                python = options.deepspeed_python
                yield kind, [self._rank(n, kind, "deepspeed_rank", common, python) for n in numbers]
                continue
            experts = ["--experts", options.experts] if self._shape.experts else []
            yield kind, [self._rank(n, kind, "peer_rank", [*common, "--kind", kind, *experts]) for n in numbers]
        if not options.no_limit and options.ranks == 1 and not self._shape.latent:  # its kernels have all cores
            yield LIMIT, [Rank([sys.executable, "-m", f"{HERE}.limit_rank", *common], self._place(0))]

    def _rank(self, number: int, name: str, module: str, argv: Sequence[str], python: str = sys.executable) -> Rank:
        meet = ["--rendezvous", f"file://{self._meet / name}"] if self._options.ranks > 1 else []
        return Rank([python, "-m", f"{HERE}.{module}", *meet, *argv], self._place(number))

    def _place(self, number: int) -> dict[str, str]:
        ranks = self._options.ranks
        threads = max(1, (os.cpu_count() or 1) // ranks) if self._options.device == "cpu" else 1
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
        if self._options.device == "cuda":  # as the launcher sets it, for all contestants
            place["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        return {**place, "OMP_NUM_THREADS": str(threads)}


def _check_deepspeed(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.peer != [DEEPSPEED] or options.model != ["moe"] or (options.device, options.ranks) != ("cpu", 2):
        parser.error("DeepSpeed-MoE races by itself: --device cpu --ranks 2 --model moe --peer deepspeed")
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)"
    if subprocess.run([options.deepspeed_python, "-c", look], check=False).returncode:
        parser.error(
            f"{options.deepspeed_python} has no DeepSpeed: behind torch, DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "
            "pip install --no-build-isolation deepspeed, and name that interpreter with --deepspeed-python"
        )


def _groups(limit: Mapping[str, float]) -> str:
    shares = {name: value for name, value in limit.items() if name not in ("seconds", "gemm_flops")}
    return ", ".join(f"{name} {value:.3f} s" for name, value in sorted(shares.items(), key=lambda pair: -pair[1]))


if __name__ == "__main__":
    main()
