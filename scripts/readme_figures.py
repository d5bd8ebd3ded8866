#!/usr/bin/env python3
"""Write the tables of figures from the newest results that benchmarks/ has of each: all of them, and the README's few.

scripts/readme_figures.py            write the tables, between their comments in docs/figures.md and README.md
scripts/readme_figures.py --check    only report a difference, with exit status 1

Date and commit are those that a result states. Others have the date of their file's name, and the commit that gave the
file its content; benchmarks/commits.json keeps it for clones without history.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.marked import replaced  # noqa: E402

PART = "figures: scripts/readme_figures.py"
COMMITS = Path("benchmarks/commits.json")
README, PAGE = Path("README.md"), Path("docs/figures.md")
Record = Mapping[str, Any]


class FiguresError(Exception):
    """A figure has no result, or a result has neither date nor commit."""


@dataclass(frozen=True)
class Figure:
    """A row of the table.

    Attributes:
        what: The figure.
        to: What it is relative to.
        files: Pattern of its result files below benchmarks/, whose names sort by date.
        value: Returns the ratio as text, from the lines of a file up to one. Raises KeyError or TypeError if that line
            is of another kind.
        short: It is also in the README.
    """

    what: str
    to: str
    files: str
    value: Callable[[Sequence[Record]], str]
    short: bool = False

    @property
    def benchmark(self) -> str:
        """The folder of benchmarks/ that measures it."""
        return self.files.partition("/")[0]


def times(ratio: float) -> str:
    """Return a ratio of speeds or sizes."""
    return f"{ratio:.2f}"


def percent(share: float) -> str:
    """Return a share."""
    return f"{100 * share:.1f} %"


def to_peer(model: str, peer: str) -> Callable[[Sequence[Record]], str]:
    """Return a reader of the speed relative to a peer, of a race over this model."""
    return lambda records: times(records[-1][model]["speed_to"][peer])


def latent_to(peer: str) -> Callable[[Sequence[Record]], str]:
    """Return a reader of the same where each contestant has a line: the median of the ratios within a round."""

    def value(records: Sequence[Record]) -> str:
        rounds = {record["contestant"]: record["rounds"] for record in records if "rounds" in record}
        pairs = zip(rounds[peer], rounds["megapar"], strict=True)
        return times(median(theirs["seconds"] / ours["seconds"] for theirs, ours in pairs))

    return value


def on_gpu(model: str, peer: str) -> Callable[[Sequence[Record]], str]:
    """Return a reader of the same for full samples of one model, in the newest race that has the peer."""

    def value(records: Sequence[Record]) -> str:
        plain = {"model": model, "lengths": "full", "micro_batches": 1, "ended": True}
        lines = [one for one in records if all(one.get(key, wanted) == wanted for key, wanted in plain.items())]
        race = {one["contestant"]: one.get("race") for one in lines}[peer]
        return latent_to(peer)([one for one in lines if one.get("race") == race])

    return value


def link_speed(records: Sequence[Record]) -> str:
    """Return the speed of stage 1 relative to FSDP2 over a slow link."""
    seconds = records[-1]["link fp32"]["seconds"]
    return times(seconds["FSDP2 per layer"] / seconds["stage 1"])


def machine_speed(records: Sequence[Record]) -> str:
    """Return the speed of stage 1 relative to DDP without a limit."""
    speed = records[-1]["machine fp32"]["tokens_per_second"]
    return times(speed["stage 1"] / speed["DDP"])


def bubble(schedule: str) -> Callable[[Sequence[Record]], str]:
    """Return a reader of the bubble of a schedule relative to 1F1B's."""

    def value(records: Sequence[Record]) -> str:
        measured = {name: one["measured"] for name, one in records[-1]["bubble"].items()}
        return times(measured[schedule] / measured["1f1b, 1 chunks"])

    return value


def restarted(records: Sequence[Record]) -> str:
    """Return the speed of a restart by forking relative to one that starts processes."""
    seconds = records[-1]["seconds"]
    return times(median(seconds["one by one"]) / median(seconds["warm"]))


def predicted(records: Sequence[Record]) -> str:
    """Return the median error of runs that no constant was fitted to."""
    errors = [
        abs(record["error"])
        for record in records
        if record["use"] != "fit" and "error" in record and "unscored" not in record
    ]
    return percent(median(errors))


def sliced(records: Sequence[Record]) -> str:
    """Return the speed of a step with slices across layers relative to the serial one, over a slow link."""
    ways = records[-1]["rates"][0]["ways"]
    return times(ways["serial"]["seconds"] / ways["cross-layer 2"]["seconds"])


def recompute_memory(records: Sequence[Record]) -> str:
    """Return the memory of a step that recomputes every layer, relative to one that keeps everything."""
    memory = records[-1]["memory_bytes"]
    return times(memory["recompute"]["device"] / memory["none"]["device"])


def recompute_time(records: Sequence[Record]) -> str:
    """Return the time of the same, the median of the ratios within a round."""
    rounds = records[-1]["rounds"]
    pairs = zip(rounds["recompute"], rounds["none"], strict=True)
    return times(median(again["seconds"] / none["seconds"] for again, none in pairs))


def guarded(records: Sequence[Record]) -> str:
    """Return the time of a step with all guards relative to one without."""
    return f"{1 + records[-1]['cost']['all, as by default']['steps']:.3f}"


RACES = "throughput/results/*cpu.jsonl"
GPU_RACES = "throughput/results/*-h200*.jsonl"
RECOMPUTE = "recompute/results/20*cpu.json"
FIGURES = (
    *(
        Figure(f"speed: {name}, one H200, bf16", "transformers, not compiled", GPU_RACES, on_gpu(model, "eager"), short)
        for name, model, short in (
            ("dense decoder, 1.4 B", "dense", True),
            ("mixture of experts, 2.7 B", "moe", True),
            ("ERNIE, 1.5 B", "ernie", False),
        )
    ),
    Figure("speed: ERNIE, one process", "transformers with torch.compile", RACES, to_peer("ernie fp32", "compile")),
    Figure(
        "speed: decoder in DeepSeek-V3's form, one process",
        "transformers with torch.compile",
        "throughput/results/*mla-cpu.jsonl",
        latent_to("compile"),
    ),
    Figure("speed: mixture of experts, two processes", "FSDP2", RACES, to_peer("moe fp32", "fsdp2")),
    Figure("speed: the same with experts over both", "DeepSpeed-MoE", RACES, to_peer("moe fp32", "deepspeed")),
    Figure(
        "speed: tensor parallelism, mp 2",
        "DTensor",
        "tensor_parallel/results/*speed-cpu.json",
        lambda records: times(records[-1]["speed"]["to_peer"]),
    ),
    Figure("speed: sharding over a slow link", "FSDP2", "sharding/results/*link-fp32-cpu.json", link_speed),
    Figure("speed: sharding without a limit", "DDP", "sharding/results/*machine-fp32-cpu.json", machine_speed),
    Figure(
        "speed: dispatch by node, messages half of the step",
        "plain dispatch",
        "node_dispatch/results/*cpu.json",
        lambda records: times(records[-1]["shapes"][0]["shares"][0]["gain"]),
    ),
    Figure("speed: AMPipe across layers, slow link, CPU", "AMPipe off", "step_hiding/results/*cpu.jsonl", sliced, True),
    Figure("time: bubble of ZBV", "1F1B", "pipeline/results/*cpu.json", bubble("zero_bubble, 2 chunks")),
    Figure("memory: every layer recomputed", "nothing recomputed", RECOMPUTE, recompute_memory),
    Figure("time: every layer recomputed", "nothing recomputed", RECOMPUTE, recompute_time),
    Figure("time: a step with all guards", "no guards", "guards/results/*cpu.jsonl", guarded),
    Figure(
        "speed: from a kill to the next step, ranks forked from a warm process",
        "ranks started from nothing",
        "reliability/results/*restart-cpu.json",
        restarted,
        True,
    ),
    Figure(
        "median error of planned tokens per second, GPU runs that nothing was fitted to",
        "published speeds",
        "prediction/results/tokens.jsonl",
        predicted,
        True,
    ),
    Figure(
        "the same of runs of 2026 that were chosen before any was planned",
        "published speeds",
        "prediction/results/blind-2026.jsonl",
        predicted,
    ),
)


def newest(figure: Figure, root: Path) -> tuple[str, Path, Record]:
    """Return the value of a figure, its file and its line of it: the newest that has one. Raises FiguresError."""
    for path in sorted((root / "benchmarks").glob(figure.files), reverse=True):
        records = list(read(path))
        for last in range(len(records), 0, -1):
            try:
                return figure.value(records[:last]), path.relative_to(root), records[last - 1]
            except (KeyError, TypeError):
                continue
    raise FiguresError(f"no result in benchmarks/{figure.files} has {figure.what!r}")


def read(path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON file, or of each line of it."""
    text = path.read_text(encoding="utf-8")
    yield from (
        (json.loads(line) for line in text.splitlines() if line) if path.suffix == ".jsonl" else [json.loads(text)]
    )


def content_hash(path: Path) -> str:
    """Return 16 hexadecimal digits of SHA-256 over a file, which show that it has changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def committed(path: Path, known: Mapping[str, Mapping[str, str]], root: Path) -> dict[str, str]:
    """Return date, commit and hash of a file without them: as known, or from git. Raises FiguresError."""
    entry = known.get(path.as_posix(), {})
    if entry.get("sha256") == content_hash(root / path):
        return dict(entry)
    ask = ["git", "-C", str(root)]
    changed = subprocess.run([*ask, "status", "--porcelain", "--", str(path)], capture_output=True, text=True).stdout
    found = subprocess.run(
        [*ask, "log", "-1", "--format=%as %H", "--", str(path)], capture_output=True, text=True
    ).stdout.split()
    if changed or not found:
        raise FiguresError(f"{path} states no commit: commit it, then run scripts/readme_figures.py")
    return {"date": found[0], "commit": found[1][:8], "sha256": content_hash(root / path)}


def table(root: Path, known: Mapping[str, Mapping[str, str]], page: Path) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the table of a page, and the commits of the results that state none. Raises FiguresError."""
    lines, used = ["| value | what | against | measured |", "|---|---|---|---|"], {}
    for figure in FIGURES if page == PAGE else (figure for figure in FIGURES if figure.short):
        value, path, record = newest(figure, root)
        date, commit = record.get("date"), record.get("commit")
        if commit is None:
            used[path.as_posix()] = stored = committed(path, known, root)
            commit, date = stored["commit"], date or (path.name[:10] if path.name[:2] == "20" else stored["date"])
        date = date or path.name[:10]
        up = "../" * (len(page.parts) - 1)
        source = f"[{date}, {commit[:7]}]({up}benchmarks/{figure.benchmark})"
        lines.append(f"| {value} | {figure.what} | {figure.to} | {source} |")
    return "\n".join(lines), used


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the tables. With --check, return 1 if one differs instead."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a table differs")
    options = parser.parse_args(argv)
    commits = root / COMMITS
    known = json.loads(commits.read_text(encoding="utf-8")) if commits.exists() else {}
    try:
        texts, used = {page: table(root, known, page)[0] for page in (README, PAGE)}, table(root, known, PAGE)[1]
    except FiguresError as error:
        print(error, file=sys.stderr)
        return 1
    old = {page: (root / page).read_text(encoding="utf-8") for page in texts}
    new = {page: replaced(old[page], PART, text) for page, text in texts.items()}
    if options.check:
        if differs := (old, known) != (new, used):
            print(f"{README}, {PAGE} and benchmarks/ differ: run scripts/readme_figures.py", file=sys.stderr)
        return int(differs)
    for page, text in new.items():
        (root / page).write_text(text, encoding="utf-8")
    commits.write_text(json.dumps(used, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
