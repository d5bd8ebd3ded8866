"""Tokens per second of a training step against transformers' own models, and against the sum of its kernels.

    python -m benchmarks.throughput.run [--device cpu|cuda] [--model NAME] [--dtype fp32|bf16] [--ranks N] [--rounds N]

Every contestant starts from the same weights and reads the same batches; the losses of the first step are compared.
One rank: transformers eager and under torch.compile. Two: under DDP and FSDP2. On a CPU the ranks share its cores and
take turns; on a GPU, whose memory would not hold them all, and with --seconds, one runs after the other, in the order
of their worth: megapar, transformers, the sum of kernels, transformers under torch.compile. There each has a line in
--jsonl, also if it failed or its time was over; a later call with the same file runs only the others.

    python -m benchmarks.throughput.run --ranks 2 --model moe --peer deepspeed [--deepspeed-python VENV/bin/python]

compares with DeepSpeed-MoE; megapar also distributes its experts over the ranks then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path

from benchmarks.support.contest import Contest, Figures, Rank, median, paired, place
from benchmarks.support.table import machine, print_json, print_table
from benchmarks.throughput.prepare import FILES
from benchmarks.throughput.shape import SHAPES, Shape, find

HERE = "benchmarks.throughput"
MODELS = "ernie, moe, on a CPU mla, on a GPU dense, dense8b"
OURS, LIMIT = "megapar", "sum of kernels"
COMPILE, LAYERS = "compile", "compile-layers"  # the second runs where the first has failed
PEERS = {
    ("cpu", 1): ("eager", "compile"),
    ("cpu", 2): ("ddp", "fsdp2"),
    ("cuda", 1): ("eager", COMPILE),
    ("cuda", 2): ("fsdp2",),
}
DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("bf16",)}
# megapar's flags, as a user would choose them on such a machine. Two ranks of one machine gain nothing from sharding in
# fp32: whole master weights are the parameters themselves, so that nothing is gathered or copied.
OWN_FLAGS = {("cpu", 2): "--hybrid-dp --sharding-degree 1", ("cuda", 2): "--compile"}
WAYS = ("", "--compile")  # flags of ours on one GPU; the first is the basis of all comparisons
# megapar's flags for a peer that has experts on both ranks.
SHARED_EXPERTS = "--ep-degree 2"
DEEPSPEED = "deepspeed"
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # of the first step's loss, relative
LEAST_SECONDS = 8.0  # with fewer left, no contestant starts
KEPT = 3000  # characters of the errors of a contestant that failed
MEMORY = "out of memory"  # a reason, and what torch says


def main() -> None:
    """Run the races, and print a table for each model and one line of JSON."""
    options = _options()
    options.ends = time.monotonic() + options.seconds
    options.facts = {"date": date.today().isoformat(), "commit": options.commit or _commit()}
    options.facts["machine"] = f"{machine(options.device)}, transformers {version('transformers')}"
    result: dict[str, object] = {"benchmark": "throughput", **options.facts, "ranks": options.ranks}
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--model", action="append", help=f"{MODELS}; default: all of the device; or tiny-dense, ..")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), action="append", help="default: fp32 and bf16; cuda: bf16")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=1, help="of an update, each of the shape's size")
    parser.add_argument("--lengths", choices=tuple(FILES), default="full", help="real: padded samples, ERNIE only")
    parser.add_argument("--peer", action="append", help="default: both of that many ranks; or deepspeed, by itself")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="the interpreter that has DeepSpeed")
    parser.add_argument(
        "--flags",
        action="append",
        help="more flags of ours, in one word; given again, ours races with these, too (default: OWN_FLAGS, WAYS)",
    )
    parser.add_argument("--jsonl", type=Path, help="add a line per contestant to this file as soon as it has run")
    parser.add_argument("--minutes", type=float, help="begin no model that could end later; default: 7.5 on cuda")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end by then, with the contestants that ran")
    parser.add_argument(
        "--peer-seconds", type=float, default=60.0, help="limit of a compiled peer's start and first step"
    )
    parser.add_argument("--no-limit", action="store_true", help="leave the sum of kernels out")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' experts: grouped_mm, batched_mm, eager")
    parser.add_argument("--folder", type=Path, help="keep weights and batches here, or find them here")
    parser.add_argument("--commit", help="commit of this tree, if it is a copy without a git history")
    options = parser.parse_args()
    if options.minutes is None:
        options.minutes = 7.5 if options.device == "cuda" else math.inf
    if DEEPSPEED in (options.peer or ()):
        _check_deepspeed(parser, options)
    kinds = {find(options.device, model).kind for model in options.model or SHAPES[options.device]}
    if options.lengths != "full" and kinds != {"ernie"}:
        parser.error("--lengths real is for ERNIE, whose samples are padded: add --model ernie")
    if options.ranks > 1 and (options.micro_batches > 1 or options.lengths != "full"):
        parser.error("--micro-batches and --lengths real are for one rank: leave --ranks out")
    return options


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
        self._ends: float = options.ends
        self._folder = weights / f"{options.device}-{model}"
        self._peers = options.peer or PEERS[options.device, options.ranks]
        self._tokens = self._shape.tokens * options.micro_batches
        self._alone = options.device == "cuda" or self._ends < math.inf
        self._facts = {
            **options.facts,
            "model": model,
            "dtype": dtype,
            "device": options.device,
            "tokens": self._tokens,
        }
        self._facts |= {"lengths": options.lengths, "micro_batches": options.micro_batches}
        self._flags: dict[str, str] = {}  # of megapar's contestants
        self._first: dict[str, float] = {}
        self._times: dict[str, list[Figures]] = {}
        self._limit: Figures = {}

    def run(self) -> dict[str, object]:
        """Run the steps of all contestants. The losses of the first ones are compared."""
        contestants = dict(self._contestants())
        if not self._alone:
            self._interleave(contestants)
        else:
            self._recall()
            for name, ranks in contestants.items():
                known = name in self._times or (name == LIMIT and self._limit)
                if not known and not (name == LAYERS and COMPILE in self._times):
                    self._by_itself(name, ranks)
        if OURS not in self._times:
            raise SystemExit(f"{self._model} {self._dtype}: megapar has no times")
        return self._tell()

    def _interleave(self, contestants: Mapping[str, Sequence[Rank]]) -> None:
        with Contest(contestants) as contest:
            entries = {name: (name, "step") for name in contestants if name != LIMIT}
            for name, entry in entries.items():
                self._first[name] = contest.turn(*entry)["loss"]
                self._compare(name)
            self._times = contest.rounds(self._options.rounds, entries, warmup=0)  # the first turn was the warmup
            if LIMIT in contestants:
                self._limit = contest.turn(LIMIT, "all")
        for name, figures in self._times.items():
            self._note(name, {**self._stepped(name, figures), "ended": True})
        if self._limit:
            self._note(LIMIT, {**self._limit, "ended": True})

    def _by_itself(self, name: str, ranks: Sequence[Rank]) -> None:
        """Run one contestant, and write its line. If it fails or its time is over, the line says so."""
        began, rounds = time.monotonic(), list[Figures]()
        try:
            if self._left() < LEAST_SECONDS:
                raise TimeoutError(f"left out: {self._left():.0f} s were left")
            with Contest({name: ranks}) as contest:
                found = {**self._turns(contest, name, rounds), "ended": True}
        except (RuntimeError, TimeoutError) as error:
            found = {"ended": False, "rounds": rounds, **_failure(error, self._printed(name))}
            print(f"{self._model}, {self._dtype}: without {name}: {found['reason']}\n", flush=True)
        sys.stderr.write(self._printed(name))
        self._note(name, {**found, "took": time.monotonic() - began})

    def _printed(self, name: str) -> str:
        """Return the standard error of a contestant that has run by itself."""
        files = sorted(self._meet.glob(f"{name.replace(' ', '_')}.*.errors"))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def _turns(self, contest: Contest, name: str, rounds: list[Figures]) -> dict[str, object]:
        """Return the figures of a contestant that runs by itself; its timed steps are added to ``rounds``."""
        if name == LIMIT:
            self._limit = contest.turn(LIMIT, "all", self._left())
            return dict(self._limit)
        first = min(self._left(), self._options.peer_seconds if name in (COMPILE, LAYERS) else math.inf)
        self._first[name] = contest.turn(name, "step", first)["loss"]
        self._compare(name)
        contest.turn(name, "step", self._left())
        for _ in range(self._options.rounds):
            rounds.append(contest.turn(name, "step", self._left()))
        self._times[name] = rounds
        return self._stepped(name, rounds)

    def _stepped(self, name: str, rounds: list[Figures]) -> dict[str, object]:
        figures = {"rounds": rounds, "seconds": median(rounds), "first_loss": self._first[name]}
        return {**figures, "valid_tokens_per_second": self._valid_rate(rounds)} if OURS in self._times else figures

    def _valid_rate(self, rounds: Sequence[Figures]) -> float:
        """Return the tokens per second without padding. Every contestant has megapar's batch in a round."""
        return sum(one["valid_tokens"] for one in self._times[OURS]) / sum(one["seconds"] for one in rounds)

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _recall(self) -> None:
        """Read the contestants that ended in an earlier call with the same flags, commit and machine."""
        path = self._options.jsonl
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        for line in map(json.loads, text.splitlines()):
            name = line["contestant"]
            same = {**self._facts, "date": line["date"], "flags": self._flags.get(name), "ended": True}
            if any(line.get(key) != value for key, value in same.items()):
                continue
            if name == LIMIT:
                self._limit = {key: value for key, value in line.items() if isinstance(value, float) and key != "took"}
            elif len(line["rounds"]) == self._options.rounds:
                self._times[name], self._first[name] = line["rounds"], line["first_loss"]

    def _note(self, name: str, figures: Mapping[str, object]) -> None:
        """Append a line, if there is a file for it."""
        if self._options.jsonl is not None:
            flags = {"flags": self._flags[name]} if name in self._flags else {}
            with self._options.jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**self._facts, "contestant": name, **flags, **figures}) + "\n")

    def _compare(self, name: str) -> None:
        """Check a first loss with the first contestant's. Raises RuntimeError."""
        basis, loss = next(iter(self._first.values())), self._first[name]
        if not math.isclose(loss, basis, rel_tol=TOLERANCE[self._dtype]):
            del self._first[name]
            raise RuntimeError(f"{self._model} {self._dtype}: first loss of {name} is {loss}, not {basis}")

    def _tell(self) -> dict[str, object]:
        tokens, first, times, limit = self._tokens, self._first, self._times, self._limit
        seconds = {name: median(figures) for name, figures in times.items()}
        gigabytes = {name: max(f["peak_bytes"] for f in figures) / 1e9 for name, figures in times.items()}
        ratios = {name: paired(figures, times[OURS]) for name, figures in times.items() if name != OURS}
        print(f"{self._model}, {self._dtype}: {tokens} tokens a step; first loss {first[OURS]:.6f} for all")
        if self._options.lengths != "full":
            rates = (f"{name} {self._valid_rate(figures):.0f}" for name, figures in times.items())
            print(f"tokens/s without padding: {', '.join(rates)}")
        print()
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
        achieved = statistics.median(one["flops"] / one["seconds"] for one in times[OURS]) / self._options.ranks
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
        """Yield all contestants, those first that matter most if time is short."""
        options, numbers = self._options, range(self._options.ranks)
        common = ["--device", options.device, "--model", self._model, "--dtype", self._dtype, str(self._folder)]
        data = ["--micro-batches", str(options.micro_batches), "--lengths", options.lengths]
        own = OWN_FLAGS.get((options.device, options.ranks), "")
        own = SHARED_EXPERTS if DEEPSPEED in self._peers else own
        ways = WAYS if (options.device, options.ranks) == ("cuda", 1) else [own]
        for number, flags in enumerate(options.flags or ways):
            name = f"{OURS} {flags or 'plain'}" if number else OURS
            self._flags[name] = flags
            line = [*data, *common, "--", *flags.split()]
            yield name, [self._rank(n, name, "ours_rank", line) for n in numbers]
        experts = ["--experts", options.experts] if self._shape.experts else []
        compiled = [kind for kind in self._peers if kind in (COMPILE, LAYERS)]
        for kind in (kind for kind in self._peers if kind not in compiled):
            if kind == DEEPSPEED:
                yield kind, [self._rank(n, kind, "deepspeed_rank", common, options.deepspeed_python) for n in numbers]
                continue
            yield kind, [self._rank(n, kind, "peer_rank", [*data, *common, "--kind", kind, *experts]) for n in numbers]
        # The kernels have all cores, and full samples.
        if not options.no_limit and options.ranks == 1 and not self._shape.latent and options.lengths == "full":
            yield LIMIT, [self._rank(0, LIMIT, "limit_rank", [*data[:2], *common])]
        if self._alone and COMPILE in compiled:
            compiled = [COMPILE, LAYERS]
        for kind in compiled:
            yield kind, [self._rank(n, kind, "peer_rank", [*data, *common, "--kind", kind, *experts]) for n in numbers]

    def _rank(self, number: int, name: str, module: str, argv: Sequence[str], python: str = sys.executable) -> Rank:
        name = name.replace(" ", "_")
        meet = ["--rendezvous", f"file://{self._meet / name}"] if self._options.ranks > 1 else []
        errors = self._meet / f"{name}.{number}.errors" if self._alone else None
        return Rank([python, "-m", f"{HERE}.{module}", *meet, *argv], self._place(number), errors=errors)

    def _place(self, number: int) -> dict[str, str]:
        ranks = self._options.ranks
        threads = max(1, (os.cpu_count() or 1) // ranks) if self._options.device == "cpu" else 1
        on_gpu = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # as the launcher sets it, for all contestants
        return place(number, ranks, threads) | (on_gpu if self._options.device == "cuda" else {})


def _check_deepspeed(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.peer != [DEEPSPEED] or options.model != ["moe"] or (options.device, options.ranks) != ("cpu", 2):
        parser.error("DeepSpeed-MoE races by itself: --device cpu --ranks 2 --model moe --peer deepspeed")
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)"
    if subprocess.run([options.deepspeed_python, "-c", look], check=False).returncode:
        parser.error(
            f"{options.deepspeed_python} has no DeepSpeed: behind torch, DS_ACCELERATOR=cpu DS_BUILD_OPS=0 "
            "pip install --no-build-isolation deepspeed, and name that interpreter with --deepspeed-python"
        )


def _failure(error: Exception, printed: str) -> dict[str, object]:
    """Return why a contestant has failed, and the end of what it printed."""
    reason = str(error)
    if isinstance(error, RuntimeError) and MEMORY in printed.lower():
        reason = MEMORY
    return {"reason": reason, "output": printed[-KEPT:]}


def _groups(limit: Mapping[str, float]) -> str:
    shares = {name: value for name, value in limit.items() if name not in ("seconds", "gemm_flops")}
    return ", ".join(f"{name} {value:.3f} s" for name, value in sorted(shares.items(), key=lambda pair: -pair[1]))


if __name__ == "__main__":
    main()
