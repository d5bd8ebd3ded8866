"""Which tests reach which lines of the package, in the ranks that they start too: a plugin of pytest, and its table.

``REACH_FOLDER=FOLDER pytest -p tests.museum.reach`` leaves files there that ``Reach.of`` reads. The ranks of
tests.support.ranks, which serve one test after the other, name the test that they work for. Programs that tests start
as commands are not seen, and what a fixture or a cache keeps counts for the first test that asked for it.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import coverage
import pytest

from tests.museum.mutants import FOLDERS, Mutant
from tests.support import ranks

ROOT = Path(__file__).parents[2]
PLUGIN = ("-p", "tests.museum.reach", "--ignore=tests/museum", "--ignore=tests/benchmarks", "--ignore=tests/faults")
MOST_SECONDS = 60.0  # tests that take longer are left out

_MEASURED: list[coverage.Coverage] = []  # that of this process


@contextmanager
def recorded(folder: Path, test: str) -> Iterator[None]:
    """Append what this process reaches inside to its file, as lines of a test."""
    if not _MEASURED:
        sources = [str(ROOT / "megapar" / area) for area in FOLDERS]
        _MEASURED.append(coverage.Coverage(data_file=None, source=sources, config_file=False, messages=False))
    measured = _MEASURED[0]
    measured.start()
    measured.switch_context(test)
    try:
        yield
    finally:
        measured.stop()
        data = measured.get_data()
        data.set_query_context(test)
        lines = {str(Path(name).relative_to(ROOT)): sorted(data.lines(name) or ()) for name in data.measured_files()}
        _append(folder, {"test": test, "lines": {name: found for name, found in lines.items() if found}})


@dataclass(frozen=True)
class Recorded:
    """A function that a rank calls for a test."""

    function: Callable[..., Any]
    folder: Path
    test: str

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, *args: Any) -> Any:
        """Call it, and append what it reached."""
        with recorded(self.folder, self.test):
            return self.function(*args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Record a test, and have the ranks that it calls record it."""
    folder, run = Path(os.environ["REACH_FOLDER"]), ranks.Pool.run

    def run_recorded(pool: ranks.Pool, function: Callable[..., Any], *args: Any) -> Any:
        return run(pool, Recorded(function, folder, item.nodeid), *args)

    with patch.object(ranks.Pool, "run", run_recorded), recorded(folder, item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Append the seconds of each part of a test, and whether it passed."""
    report: pytest.TestReport = yield
    _append(
        Path(os.environ["REACH_FOLDER"]), {"test": item.nodeid, "seconds": report.duration, "passed": report.passed}
    )
    return report


def _append(folder: Path, row: dict[str, Any]) -> None:
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


@dataclass
class Reach:
    """Which tests reach which lines.

    Attributes:
        seconds: What each test took.
        lines: The tests of each line of each file.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, frozenset[str]]] = field(default_factory=dict)

    @classmethod
    def measured(cls, options: Sequence[str]) -> Reach:
        """Run the suite with more options of pytest."""
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, "REACH_FOLDER": folder, "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, "-m", "pytest", *PLUGIN, *options], cwd=ROOT, env=environ)
            return cls.of(Path(folder))

    @classmethod
    def of(cls, folder: Path) -> Reach:
        """Return what a run left in a folder, without the tests that failed, were skipped or took too long."""
        seconds: defaultdict[str, float] = defaultdict(float)
        lines: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        failed = set()
        for row in (json.loads(line) for path in folder.glob("*.jsonl") for line in path.open(encoding="utf-8")):
            if "passed" in row:
                seconds[row["test"]] += row["seconds"]
                failed |= set() if row["passed"] else {row["test"]}
            for name, reached in row.get("lines", {}).items():
                for line in reached:
                    lines[name][line].add(row["test"])
        kept = {test: round(took, 2) for test, took in seconds.items() if test not in failed and took <= MOST_SECONDS}
        found = {name: {n: frozenset(tests & kept.keys()) for n, tests in of.items()} for name, of in lines.items()}
        return cls(kept, found)

    def tests_of(self, mutant: Mutant) -> frozenset[str]:
        """Return the tests that reach a mutant: its line, else its statement, else the module, if it runs at import."""
        lines = self.lines.get(mutant.path, {})
        wanted = [lines.get(mutant.line, frozenset())]
        wanted.append(frozenset().union(*(lines.get(line, ()) for line in range(mutant.first, mutant.last + 1))))
        if mutant.at_import:
            wanted.append(frozenset().union(*lines.values()))
        return next(filter(None, wanted), frozenset())

    def write(self, path: Path) -> None:
        """Write it: lines of one block have the same tests, a bit each."""
        numbers = {test: number for number, test in enumerate(self.seconds)}
        sets = {tests: sum(1 << numbers[test] for test in tests) for of in self.lines.values() for tests in of.values()}
        places = {tests: place for place, tests in enumerate(sets)}
        lines = {name: {line: places[tests] for line, tests in of.items()} for name, of in self.lines.items()}
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump({"seconds": self.seconds, "sets": [f"{bits:x}" for bits in sets.values()], "lines": lines}, file)

    @classmethod
    def read(cls, path: Path) -> Reach:
        """Return what was written."""
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        names = list(found["seconds"])
        bits = [int(text, 16) for text in found["sets"]]
        sets = [frozenset(name for n, name in enumerate(names) if each >> n & 1) for each in bits]
        lines = {path: {int(line): sets[place] for line, place in of.items()} for path, of in found["lines"].items()}
        return cls(found["seconds"], lines)
