"""Every fault by real processes: ``python -m tests.faults.matrix`` prints the table of docs/faults.md.

A case is named KIND or KIND, DETAIL; the table has a line for each kind.

--kills N        random kills in one job (20)
--seed N         of their moments (20)
--only TEXT      cases whose name has it
--one-per-kind   the first case of each kind, with two random kills
--jobs N         cases at a time (1)
--retry          what is not survived is tried once more, alone: limits of seconds can pass on a machine that is busy
--state FILE     outcomes so far; the same command again goes on behind them
--table FILE     where the table goes besides

CI_SHARE=0 to 7 runs an eighth of the cases.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from tests.faults import cases_checkpoints
from tests.faults.outcome import Outcome
from tests.support.shares import is_drawn

Case = Callable[[Path], Outcome]
HEADS = ("fault", "tried", "survived", "most lost steps", "lost samples", "largest loss error", "seconds to next step")


def all_cases(kills: int, seed: int) -> Iterator[tuple[str, Case]]:
    """Name and function of every case of every file of cases."""
    yield from cases_checkpoints.cases(kills, seed)
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        if path.stem != "cases_checkpoints":
            yield from importlib.import_module(f"tests.faults.{path.stem}").cases()


def kind_of(name: str) -> str:
    """What is before the first comma."""
    return name.partition(",")[0]


def first_of_each(cases: Sequence[tuple[str, Case]]) -> list[tuple[str, Case]]:
    """One case for each kind."""
    firsts = {kind_of(name): (name, case) for name, case in reversed(cases)}
    return [firsts[kind] for kind in dict.fromkeys(kind_of(name) for name, _ in cases)]


def attempt(case: Case, folder: Path) -> Outcome:
    """Run a case; one that hangs or breaks was not survived."""
    try:
        return case(folder)
    except subprocess.TimeoutExpired as late:
        return Outcome(1, 0, note=f"it hung: {(late.output or b'')[-2000:]!r}")
    except Exception:  # of one case: the others are still to be run
        return Outcome(1, 0, note=traceback.format_exc())


def row(name: str, outcomes: Sequence[Outcome]) -> str:
    """A line of the table."""
    tried, survived = sum(o.tried for o in outcomes), sum(o.survived for o in outcomes)
    lost = max((steps for o in outcomes for steps in o.lost_steps), default=0)
    samples = max((o.lost_samples for o in outcomes), default=0)
    worst = max((o.worst for o in outcomes), default=0.0)
    seconds = [second for o in outcomes for second in o.seconds]
    median = f"{statistics.median(seconds):.1f}" if seconds else ""
    return f"| {name} | {tried} | {survived} | {lost} | {samples} | {worst:.1g} | {median} |"


def table(outcomes: dict[str, Outcome]) -> str:
    """A line for each kind and one for all, and how long it took from a fault to the next step."""
    kinds: dict[str, list[Outcome]] = {}
    for name, outcome in outcomes.items():
        kinds.setdefault(kind_of(name), []).append(outcome)
    rows = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    rows += [row(kind, found) for kind, found in kinds.items()]
    rows.append(row(f"**all {len(kinds)} kinds**", list(outcomes.values())))
    seconds = [second for outcome in outcomes.values() for second in outcome.seconds]
    if seconds:
        median = statistics.median(seconds)
        rows += ["", f"From a fault to the next step: median {median:.1f} s, most {max(seconds):.1f} s."]
    return "\n".join(rows)


def read_state(path: Path | None) -> dict[str, Outcome]:
    """Outcomes of cases that were run before and survived; the others are run again."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["name"]: Outcome(**line["outcome"]) for line in lines}
    return {name: outcome for name, outcome in found.items() if outcome.survived == outcome.tried}


def run_all(
    cases: Sequence[tuple[str, Case]], root: Path, jobs: int, start: float, state: Path | None
) -> Iterator[tuple[str, Outcome]]:
    """Name and outcome of every case as they end, each told and written down. jobs: cases at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        begun = {pool.submit(attempt, case, root / str(number)): name for number, (name, case) in enumerate(cases)}
        for done in as_completed(begun):
            name, outcome = begun[done], done.result()
            print(f"{row(name, [outcome])} at {time.monotonic() - start:.0f} s", flush=True)
            if outcome.survived < outcome.tried or outcome.note:
                print(outcome.note, flush=True)
            if state:
                with state.open("a") as lines:
                    lines.write(json.dumps({"name": name, "outcome": asdict(outcome)}) + "\n")
            yield name, outcome


def options_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--only", default="")
    parser.add_argument("--one-per-kind", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--retry", action="store_true")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--table", type=Path)
    return parser.parse_args(argv)


def main() -> int:
    """Run what is asked for; 1 where a fault was not survived."""
    options = options_of()
    cases = list(all_cases(2 if options.one_per_kind else options.kills, options.seed))
    if options.one_per_kind:
        cases = first_of_each(cases)
    cases = [(name, case) for name, case in cases if options.only in name and is_drawn(name)]
    before = read_state(options.state)
    outcomes = {name: before[name] for name, _ in cases if name in before}
    print(f"seed {options.seed}, {len(cases)} cases, {len(outcomes)} of them done before", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        left = [(name, case) for name, case in cases if name not in outcomes]
        for name, outcome in run_all(left, Path(root) / "first", options.jobs, start, options.state):
            outcomes[name] = outcome
        failed = [(name, case) for name, case in left if outcomes[name].survived < outcomes[name].tried]
        if options.retry and failed:
            print(f"once more, alone: {'; '.join(name for name, _ in failed)}", flush=True)
            for name, outcome in run_all(failed, Path(root) / "again", 1, start, options.state):
                outcomes[name] = outcome
    text = table({name: outcomes[name] for name, _ in cases})
    print(f"{text}\n{time.monotonic() - start:.0f} s")
    if options.table:
        options.table.write_text(text + "\n")
    return int(any(outcome.survived < outcome.tried for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
