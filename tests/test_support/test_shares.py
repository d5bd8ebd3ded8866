"""Eight shares of the tables: no row runs in two of them, and each runs in one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.faults.matrix import all_cases
from tests.museum.museum import exhibits
from tests.support.shares import SHARES, is_drawn

ROOT = Path(__file__).parents[2]
NAMES = {
    "faults": [name for name, _ in all_cases(20, 20)],
    "docs": [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")],
    "museum": [one.name for one in exhibits()],
    "law": [f"law {number}" for number in range(50, 500)],
}


@pytest.mark.parametrize("table", NAMES)
def test_shares_are_disjoint_and_complete(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Counter[str] = Counter()
    for share in range(SHARES):
        monkeypatch.setenv("CI_SHARE", str(share))
        found = [name for name in NAMES[table] if is_drawn(name)]
        assert found or len(NAMES[table]) < 100, f"share {share} is empty"
        runs.update(found)
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


def test_lines_that_are_drawn_are_passed_on() -> None:
    lines = "\n".join(NAMES["docs"])
    command = [sys.executable, "-m", "tests.support.shares"]
    passed = [
        subprocess.run(
            command,
            input=lines,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "CI_SHARE": share},
        ).stdout.split()
        for share in map(str, range(SHARES))
    ]
    assert sorted(line for found in passed for line in found) == sorted(NAMES["docs"])
