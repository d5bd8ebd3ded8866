"""Eight shares of the tables: no row runs in two of them, and each runs in one; covering sets cover."""

from __future__ import annotations

import itertools
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.faults.matrix import all_cases
from tests.museum.museum import exhibits
from tests.support.pairwise import covering, pairwise
from tests.support.shares import SHARES, is_drawn

NAMES = {
    "faults": [name for name, _ in all_cases(20, 20)],
    "docs": [f"docs/{path.name}" for path in (Path(__file__).parents[2] / "docs").glob("*.md")],
    "museum": [one.name for one in exhibits()],
    "law": [f"law {number}" for number in range(50, 500)],
}


@pytest.mark.parametrize("table", NAMES)
def test_shares_are_disjoint_and_complete(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Counter[str] = Counter()
    for share in range(SHARES):
        monkeypatch.setenv("CI_SHARE", str(share))
        drawn = [name for name in NAMES[table] if is_drawn(name)]
        assert drawn or len(NAMES[table]) < 100, f"share {share} is empty"
        runs.update(drawn)
    assert runs == Counter(NAMES[table])
    assert set(runs.values()) == {1}, "two rows have one name"
    for everything in ("all", ""):
        monkeypatch.setenv("CI_SHARE", everything)
        assert all(map(is_drawn, NAMES[table]))


def test_the_suite_is_never_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    kept: Counter[str] = Counter()
    for share in range(SHARES):
        monkeypatch.setenv("CI_SHARE", str(share))
        items: list[Any] = [
            SimpleNamespace(nodeid=f"{mark}[{number}]", get_closest_marker=mark.__eq__)
            for mark in ("none", *conftest.TABLES)
            for number in range(40)
        ]
        conftest.pytest_collection_modifyitems(config, items)
        kept.update(item.nodeid for item in items)
    assert {kept[f"none[{number}]"] for number in range(40)} == {SHARES}
    assert {kept[f"{mark}[{number}]"] for mark in conftest.TABLES for number in range(40)} == {1}


def test_lines_that_are_drawn_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = []
    for share in map(str, range(SHARES)):
        monkeypatch.setenv("CI_SHARE", share)
        monkeypatch.setattr("sys.stdin", [f"{name}\n" for name in NAMES["docs"]])
        runpy.run_module("tests.support.shares", run_name="__main__")
        passed += capsys.readouterr().out.split()
    assert sorted(passed) == sorted(NAMES["docs"])


def test_every_legal_pair_is_there_in_few_rows() -> None:
    factors = ((1, 2, 3), "ab", (True, False), (4, 5, 6, 7))
    rows = pairwise(factors, lambda row: row[:2] != (1, "a"))
    assert all(row[:2] != (1, "a") for row in rows)
    assert len(rows) <= 16
    for (i, left), (j, right) in itertools.combinations(enumerate(factors), 2):
        for pair in itertools.product(left, right):
            if (i, j, pair) != (0, 1, (1, "a")):
                assert any((row[i], row[j]) == pair for row in rows), pair


def test_cheap_rows_are_taken_first_and_all_that_is_needed() -> None:
    rows = ["ab", "abc", "c", "abcd", "bd"]
    assert covering(rows, str, 1) == ["abcd"]
    assert sorted(covering(rows, str, 1, lambda row: len(row) ** 2)) == ["ab", "bd", "c"]
    assert covering(rows[:3], str, 2) == ["abc"]
    assert covering(rows, str, 1, chosen=["ab"]) == ["abcd"]
    assert covering(rows, str, 1, lambda row: len(row) ** 2, chosen=["ab", "bd"]) == ["c"]
