"""Draws cases, checks them, minimises what fails, and counts."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from tests.fuzz.case import BOTH, Case, Pair, cases
from tests.fuzz.check import EQUAL, FAILED, REFUSED, Outcome, check
from tests.fuzz.pairs import Directed, Pairs
from tests.fuzz.table import OPTIONS

BATCH = 20  # cases of one hypothesis run: a failure ends it, the next ones look for others


class CaseFailed(AssertionError):
    """A case gave neither a refusal nor the numbers of one process."""


@dataclass
class Tally:
    """What was found. tried: cases, those of minimising not counted. failures: minimal case -> what is wrong.

    continued: equal ones that another layout continued from a checkpoint. hiding: equal ones on late and lazy both.
    in_buckets: equal ones that saved to an object store.
    """

    tried: int = 0
    continued: int = 0
    hiding: int = 0
    in_buckets: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    pairs: set[Pair] = field(default_factory=set)
    failures: dict[Case, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, case: Case, outcome: Outcome) -> None:
        """One case that was drawn."""
        self.tried += 1
        self.outcomes[outcome.kind] += 1
        self.rules.update(set(outcome.rules))
        if outcome.kind == EQUAL:
            self.pairs |= case.pairs()
            self.continued += case.continued is not None
            self.hiding += case.backend == BOTH
            self.in_buckets += case.bucket

    def __str__(self) -> str:
        kinds = ", ".join(f"{self.outcomes[kind]} {kind}" for kind in (REFUSED, EQUAL, FAILED))
        parts = f"{self.hiding} on both backends that delay, {self.continued} continued on another layout, "
        parts += f"{self.in_buckets} with checkpoints in a bucket"
        rate = 60 * self.tried / max(self.seconds, 1e-9)
        took = f"{self.seconds:.0f} s, {rate:.1f} cases a minute"
        return f"{self.tried} tried: {kinds}; {parts}; {len(self.pairs):,} legal pairs of options; {took}"


@dataclass
class Fuzzer:
    """Runs batches of cases from one seed; the same seed gives the same cases.

    max_cases, max_seconds: when to stop, whichever comes first. shrink_seconds: spent on minimising one failure.
    """

    seed: int
    max_cases: int
    max_seconds: float = float("inf")
    shrink_seconds: float = 60.0
    strategy: Callable[[], SearchStrategy[Case]] = cases
    check: Callable[[Case], Outcome] = check

    def run(self) -> Iterator[Tally]:
        """The tally after each batch; the last one is the result."""
        tally, start = Tally(), time.monotonic()
        seen: dict[Case, Outcome] = {}
        batch = 0
        while tally.tried < self.max_cases and time.monotonic() - start < self.max_seconds:
            before = tally.tried
            _Batch(self, tally, seen, start + self.max_seconds).run(self.seed * 2**20 + batch)
            tally.seconds = time.monotonic() - start
            batch += 1
            yield tally
            if tally.tried == before:
                return


@dataclass
class PairFuzzer:
    """Runs cases that cover the legal pairs of options; ``pairs`` is kept up to date.

    max_cases, max_seconds, shrink_seconds: as those of ``Fuzzer``.
    """

    pairs: Pairs
    seed: int
    max_cases: int
    max_seconds: float = float("inf")
    shrink_seconds: float = 60.0
    check: Callable[[Case], Outcome] = check

    def run(self) -> Iterator[Tally]:
        """The tally after every ``BATCH`` cases, and at the end."""
        tally, start, directed = Tally(), time.monotonic(), Directed(self.pairs, self.seed)
        while tally.tried < self.max_cases and time.monotonic() - start < self.max_seconds:
            case = directed.next()
            if case is None:
                break
            outcome = self.check(case)
            tally.add(case, outcome)
            if outcome.kind == EQUAL:
                self.pairs.covered |= case.pairs() & self.pairs.legal.keys()
            elif outcome.kind == FAILED:
                smallest, text = smaller(case, outcome.text, self.check, self.shrink_seconds)
                tally.failures[smallest] = text
            tally.seconds = time.monotonic() - start
            if tally.tried % BATCH == 0:
                yield tally
        yield tally


def smaller(case: Case, text: str, check: Callable[[Case], Outcome], seconds: float) -> tuple[Case, str]:
    """The case on as few ranks and with as few settings as it fails in the same way, and what is wrong with it then.

    Sizes stay, whose defaults are large, and so does the loss scale of fp16, whose default overflows.
    """
    deadline, kept = time.monotonic() + seconds, {row.name for row in OPTIONS if row.size} | {"initial_loss_scale"}
    shorter: list[Callable[[Case], Case]] = [lambda case: replace(case, continued=None)] if case.continued else []
    shorter += [lambda case: replace(case, forced=())] if case.forced else []
    shorter += [lambda case: replace(case, bucket=False)] if case.bucket else []
    names = dict(case.settings) | dict(case.continued.settings if case.continued else ())
    shorter += [partial(Case.on, world_size=ranks) for ranks in (4, 2, 1) if ranks < case.world_size]
    shorter += [partial(Case.without, name=name) for name in reversed(names) if name not in kept]
    for shortened in shorter:
        if time.monotonic() > deadline:
            break
        tried = shortened(case)  # what is left may break a row, which then is no failure
        outcome = check(tried)
        if outcome.kind == FAILED and _symptom(outcome.text) == _symptom(text):
            case, text = tried, outcome.text
    return case, text


def _symptom(text: str) -> str:
    """What kind of failure it is: a hang, the error that is raised, or numbers that differ."""
    if "did not finish" in text:
        return "hang"
    found = re.findall(r"^\S*(?:Error|Exception)\b.*", text, re.MULTILINE)
    return re.sub(r"[0-9.]+", "N", found[-1])[:60] if found else "numbers"


class _Batch:
    """One hypothesis run: until a failure, or as many cases as a batch has."""

    def __init__(self, fuzzer: Fuzzer, tally: Tally, seen: dict[Case, Outcome], deadline: float) -> None:
        self.fuzzer = fuzzer
        self.tally = tally
        self.seen = seen
        self.deadline = deadline
        self.failed: Case | None = None

    def run(self, number: int) -> None:
        run = settings(
            max_examples=BATCH,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        try:
            seed(number)(run(given(case=self.fuzzer.strategy())(self._example)))()
        except (CaseFailed, Flaky):
            assert self.failed is not None
            text, seconds = self.seen[self.failed].text, self.fuzzer.shrink_seconds
            smallest, text = smaller(self.failed, text, self.fuzzer.check, seconds)
            self.tally.failures[smallest] = text

    def _example(self, case: Case) -> None:
        drawing = self.failed is None
        if drawing and (case in self.seen or self.tally.tried >= self.fuzzer.max_cases):
            return
        outcome = self.seen.get(case)
        if outcome is None:
            if time.monotonic() > self.deadline:
                return
            outcome = self.seen[case] = self.fuzzer.check(case)
            if drawing:
                self.tally.add(case, outcome)
        if outcome.kind == FAILED:
            if drawing:
                self.deadline = time.monotonic() + self.fuzzer.shrink_seconds
            self.failed = case  # the last one that fails is the smallest
            raise CaseFailed(outcome.text)
