"""Random mutants of the package, each tried by the tests that reach its line: ``python -m tests.museum.mutator``.

Killed: a test that passes without the change fails with it, does not end within 120 seconds, or cannot be imported.
The tests of the module's own files come first, and of all those that reach much of the module soon, until --budget
seconds of them have passed. A run goes on where the one before ended. At its end, the tests that failed run without a
change; a mutant of one that fails then, too, is tried again in the next run.

--coverage       run the suite, and write which tests reach which lines to the file of --reach; other arguments are
                 given to pytest
--seed, --draws  the draw (1, 150)
--only NAME      mutants to try; those of the state, too, are tried again
--by TEST        run these tests for them: those that were written since the coverage
--again          also try again the survivors, and the mutants that no test reached
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

import yaml

from tests.museum.museum import ROOT, copy_tree
from tests.museum.mutants import Mutant, draw
from tests.museum.reach import Reach

TABLE = Path(__file__).with_name("survivors.yaml")
FATES = ("equivalent", "test", "exhibit")  # of survivors: a proof that it is the same program, or what kills it now
STATES = ("killed", "survived", "not covered", "broken")
LIMIT_SECONDS = 120  # of a test
LIMIT_BYTES = 24 << 30  # of a process's addresses: a mutant may make a tensor of any size
SLOWER = 6  # a whole run of pytest may take this many times the limit of one test
PYTEST = [
    *("-m", "pytest", "-n0", "-p", "no:cacheprovider", "-o", "faulthandler_exit_on_timeout=true"),
    *("-o", f"faulthandler_timeout={LIMIT_SECONDS}"),
]

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


class Tried(NamedTuple):
    """What tests did: the state of the mutant, and the test that failed or what pytest said."""

    state: str
    by: str


@dataclass(frozen=True)
class Verdict:
    """A line of the state file: a mutant, what became of it, and the seconds and number of the tests for it."""

    name: str
    kind: str
    place: str
    old: str
    new: str
    state: str
    by: str
    tests: int
    seconds: float


def survivors() -> list[dict[str, str]]:
    """Return the mutants of the draw that were not killed, each with one of FATES, or with why it is left."""
    return yaml.safe_load(TABLE.read_text("utf-8"))["survivors"]


def own_files(path: str) -> list[str]:
    """Return the test files of a module: that of its name in its place, and those that tests/map.yaml names."""
    inside = Path(path).relative_to("megapar")
    listed = yaml.safe_load((ROOT / "tests" / "map.yaml").read_text("utf-8")).get(inside.as_posix(), "")
    named = Path("tests") / inside.with_name(f"test_{inside.name}")
    return [*([named.as_posix()] if (ROOT / named).exists() else []), *listed.split()]


def in_order(reach: Reach, mutant: Mutant, budget: float) -> list[list[str]]:
    """Return the tests to run, in batches: those in the module's own files that reach the line, those in other files,
    and the rest of its own files, which may depend on the line through a fixture, a cache or an import.
    """
    reaching, names = reach.tests_of(mutant), own_files(mutant.path)
    own = {test for test in reach.seconds if test.partition("::")[0] in names}
    lots = [spread(reach, mutant.path, own & reaching, budget / 2)]
    for tests in (reaching - own, own - reaching):
        left = budget - sum(reach.seconds[test] for lot in lots for test in lot)
        lots.append(spread(reach, mutant.path, tests, left))
    return lots


def spread(reach: Reach, path: str, tests: Set[str], budget: float) -> list[str]:
    """Return tests of ``budget`` seconds, which soon reach many lines of a file, again and again."""
    lines = {test: {0} for test in tests}  # a line for those that reach none
    for line, reaching in reach.lines.get(path, {}).items():
        for test in reaching & tests:
            lines[test].add(line)
    kept: list[str] = []
    seen: set[int] = set()
    while lines:
        best = max(sorted(lines), key=lambda test: len(lines[test] - seen) / (0.5 + reach.seconds[test]))
        if lines[best] <= seen:
            seen = set()
            continue
        seen |= lines.pop(best)
        budget -= reach.seconds[best]
        if budget < 0:
            break
        kept.append(best)
    return kept


def read(status: int, out: str) -> Tried | None:
    """Return what a run of pytest says of a mutant; None if all its tests passed."""
    if status == 0:
        return None
    if found := FAILED.search(out):
        return Tried("killed", found[1])
    if "Timeout (0:" in out or status == 124:
        return Tried("killed", "time out")
    if "ImportError while loading conftest" in out:
        return Tried("killed", "does not import")
    return Tried("broken", f"{status}: {out[-1500:]}")


def run(tree: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Run tests in a tree; return the status of pytest and what it said."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["timeout", "-k", "5", str(LIMIT_SECONDS * SLOWER), sys.executable, *PYTEST, *options, *tests]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def judge(mutant: Mutant, lots: Sequence[Sequence[str]], clean: Path) -> Verdict:
    """Run the tests for a mutant, in a copy of a tree."""
    start, tried = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(clean, tree, symlinks=True, copy_function=os.link)
        mutant.apply(tree)
        for lot in filter(None, lots):
            tried = tried or read(*run(tree, lot, "-x"))
    state, by = tried or Tried("survived" if any(lots[:2]) else "not covered", "")
    place, number = f"{mutant.path}:{mutant.line} {mutant.function}", sum(map(len, lots))
    texts = (mutant.name, mutant.kind, place, mutant.old.strip(), mutant.new.strip(), state, by)
    return Verdict(*texts, number, round(time.monotonic() - start, 1))


def state_of(path: Path) -> dict[str, Verdict]:
    """Return the last verdict of each mutant of a state file."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {row["name"]: Verdict(**row) for row in map(json.loads, lines)}


def note(path: Path, verdict: Verdict) -> None:
    """Append a verdict to a state file, and print it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")
    print(f"{verdict.name} {verdict.state} in {verdict.seconds} s by {verdict.by}", flush=True)


def unsound(clean: Path, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return, as broken, the kills by tests that also fail in the unchanged tree."""
    tests = sorted({one.by for one in verdicts if one.state == "killed" and "::" in one.by})
    status, out = run(clean, tests) if tests else (0, "")
    if status > 1:
        raise RuntimeError(f"the tests that failed do not run without a change: {out[-2000:]}")
    failing = FAILED.findall(out)
    return [
        replace(one, state="broken", by=f"fails without a change: {one.by}") for one in verdicts if one.by in failing
    ]


def told(drawn: Sequence[Mutant], state: dict[str, Verdict]) -> str:
    """Return the score, and the mutants that were not killed."""
    known = [state[one.name] for one in drawn if one.name in state]
    counts = {name: sum(one.state == name for one in known) for name in STATES}
    timed = sum(one.by == "time out" for one in known)
    lines = [
        f"{one.name} {one.state}: {one.place}\n  - {one.old}\n  + {one.new}\n" for one in known if one.state != "killed"
    ]
    score = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{''.join(lines)}{len(known)} of {len(drawn)} tried: {score}; of the killed, {timed} by a timeout"


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutants of a draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--budget", type=float, default=90)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--state", type=Path, default=Path("build/mutants.jsonl"))
    parser.add_argument("--reach", type=Path, default=Path("build/reach.json.gz"))
    for option in ("only", "by"):
        parser.add_argument(f"--{option}", nargs="*", default=())
    for option in ("again", "coverage"):
        parser.add_argument(f"--{option}", action="store_true")
    options, for_pytest = parser.parse_known_args(argv)
    if for_pytest and not options.coverage:
        parser.error(f"unknown arguments: {' '.join(for_pytest)}")
    options.reach.parent.mkdir(parents=True, exist_ok=True)
    if options.coverage:
        Reach.measured(for_pytest).write(options.reach)
        return 0
    reach, drawn, state = Reach.read(options.reach), draw(ROOT, options.seed, options.draws), state_of(options.state)
    proved = {row["name"] for row in survivors() if "equivalent" in row}
    retried = STATES[1:] if options.again else ("broken",)
    if missing := set(options.only) - {one.name for one in drawn}:
        parser.error(f"not among the mutants drawn: {' '.join(sorted(missing))}")
    if options.only:
        wanted = [one for one in drawn if one.name in options.only]
    else:
        settled = {name for name, one in state.items() if one.state not in retried}
        wanted = [one for one in drawn if one.name not in proved | settled]
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        clean = Path(folder)
        copy_tree(clean)
        compileall.compile_dir(clean / "megapar", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        running = []
        for one in wanted:
            lots = [options.by] if options.by else in_order(reach, one, options.budget)
            running.append(pool.submit(judge, one, lots, clean))
        for done in as_completed(running):
            note(options.state, done.result())
        known, names = state_of(options.state), [one.name for one in (wanted if options.only else drawn)]
        for verdict in unsound(clean, [known[name] for name in names if name in known]):
            note(options.state, verdict)
    print(told(drawn, state_of(options.state)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
