"""The layout fuzzer from a terminal; scripts/fuzz_layouts.sh calls it. docs/fuzzing.md says what it does."""

from __future__ import annotations

import argparse
import secrets
import sys

from hypothesis import HealthCheck, Phase, given, seed, settings

from megapar.arguments import parse
from megapar.errors import ConfigError
from tests.fuzz.case import GLOO, LATE, Case, Pair, case_of, cases
from tests.fuzz.check import FAILED, check
from tests.fuzz.fuzzer import Fuzzer, Tally

MANY = 10**9
SAMPLED = 1500  # draws that are only parsed, to know which pairs of options there are


def main(argv: list[str]) -> int:
    """Status 1 where a case failed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz_layouts.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long to go on (1 without --cases)")
    parser.add_argument("--cases", type=int, help="how many cases to try")
    parser.add_argument("--seed", type=int, help="of the cases; a random one is printed where none is given")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="for minimising one failure")
    parser.add_argument("--backend", choices=(GLOO, LATE), default=GLOO, help="of --case")
    parser.add_argument("--case", nargs=argparse.REMAINDER, metavar="KIND WORLD_SIZE FLAGS", help="run this one alone")
    options = parser.parse_args(argv)
    if options.case:
        kind, world_size, *flags = options.case
        return _one(case_of(kind, int(world_size), flags, options.backend))
    number = secrets.randbelow(2**32) if options.seed is None else options.seed
    minutes = 1.0 if options.minutes is None and options.cases is None else options.minutes
    print(f"seed {number}", flush=True)
    fuzzer = Fuzzer(
        number,
        max_cases=MANY if options.cases is None else options.cases,
        max_seconds=float("inf") if minutes is None else 60 * minutes,
        shrink_seconds=options.shrink_seconds,
    )
    tally, told = Tally(), 0
    for tally in fuzzer.run():
        for case, text in list(tally.failures.items())[told:]:
            print(f"\nFAILED {case.command()}\n{text}\nagain: {case.again()}\n")
        told = len(tally.failures)
        print(tally, flush=True)
    _report(tally, number)
    return 1 if tally.failures else 0


def _one(case: Case) -> int:
    outcome = check(case)
    print(case.command(), outcome.kind, *outcome.rules, sep="\n")
    print(outcome.text)
    return 1 if outcome.kind == FAILED else 0


def _report(tally: Tally, number: int) -> None:
    print("refused by " + ", ".join(f"{rule} {count}" for rule, count in sorted(tally.rules.items())))
    legal = legal_pairs(number) | tally.pairs
    missing = sorted(legal - tally.pairs)
    print(f"covered {len(tally.pairs):,} of {len(legal):,} legal pairs that {SAMPLED:,} draws have")
    for (a, x), (b, y) in missing[:: max(1, len(missing) // 5)][:5]:
        print(f"  not covered, for example: {a} {x} with {b} {y}")


def legal_pairs(number: int) -> set[Pair]:
    """The pairs of options in cases that the rules accept, from many draws that are not run."""
    found: set[Pair] = set()

    @seed(number)
    @settings(max_examples=SAMPLED, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def look(case: Case) -> None:
        try:
            parse(case.kind, case.flags(), {"WORLD_SIZE": str(case.world_size)})
        except ConfigError:
            return
        found.update(case.pairs())

    look()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
