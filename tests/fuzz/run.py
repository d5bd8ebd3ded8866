"""The layout fuzzer from a terminal; scripts/fuzz_layouts.sh calls it. docs/fuzzing.md says what it does."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fuzz.case import BOTH, GLOO, LATE, LAZY, Case, case_of
from tests.fuzz.check import FAILED, check
from tests.fuzz.fuzzer import Fuzzer, PairFuzzer, Tally
from tests.fuzz.pairs import Pairs, Search

MANY = 10**9


def main(argv: list[str]) -> int:
    """Status 1 where a case failed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz_layouts.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long to go on (1 without --cases)")
    parser.add_argument("--cases", type=int, help="how many cases to try")
    parser.add_argument("--seed", type=int, help="of the cases; a random one is printed where none is given")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="run what covers all legal pairs; FILE remembers")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="for minimising one failure")
    parser.add_argument("--backend", choices=(GLOO, LATE, LAZY, BOTH), default=GLOO, help="of --case")
    parser.add_argument("--forced", type=json.loads, metavar="JSON", default=[{}, {}], help="outcomes of --case's runs")
    parser.add_argument("--bucket", action="store_true", help="--case saves to an object store")
    parser.add_argument("--case", nargs=argparse.REMAINDER, metavar="KIND WORLD_SIZE FLAGS", help="run this one alone")
    options = parser.parse_args(argv)
    if options.case:
        kind, world_size, *flags = options.case
        case = case_of(kind, int(world_size), flags, options.backend, options.forced)
        return _one(replace(case, bucket=options.bucket))
    number = secrets.randbelow(2**32) if options.seed is None else options.seed
    minutes = 1.0 if options.minutes is None and options.cases is None else options.minutes
    print(f"seed {number}", flush=True)
    limits: dict[str, Any] = {
        "max_cases": MANY if options.cases is None else options.cases,
        "max_seconds": float("inf") if minutes is None else 60 * minutes,
        "shrink_seconds": options.shrink_seconds,
    }
    if options.pairs is None:
        tally = _follow(Fuzzer(number, **limits))
    else:
        pairs = _pairs(options.pairs, number)
        print(pairs, flush=True)
        tally = _follow(PairFuzzer(pairs, number, **limits), lambda: pairs.save(options.pairs))
        print(pairs)
    _report(tally)
    return 1 if tally.failures else 0


def _follow(fuzzer: Fuzzer | PairFuzzer, after: Callable[[], None] = lambda: None) -> Tally:
    """Run, and tell of failures as they come."""
    tally, told = Tally(), 0
    for tally in fuzzer.run():
        for case, text in list(tally.failures.items())[told:]:
            print(f"\nFAILED {case.command()}\n{text}\nagain: {case.again()}\n")
        told = len(tally.failures)
        print(tally, flush=True)
        after()
    return tally


def _pairs(path: Path, number: int) -> Pairs:
    """Those of the file, or the result of a search that makes it."""
    if path.exists():
        return Pairs.load(path)
    pairs = Search(number).run()
    pairs.save(path)
    return pairs


def _one(case: Case) -> int:
    outcome = check(case)
    print(case.command(), outcome.kind, *outcome.rules, sep="\n")
    print(outcome.text)
    return 1 if outcome.kind == FAILED else 0


def _report(tally: Tally) -> None:
    print("refused by " + ", ".join(f"{rule} {count}" for rule, count in sorted(tally.rules.items())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
