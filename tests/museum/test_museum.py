"""Each exhibit can be made in today's package, and its test is one of those that every change runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.museum.museum import ROOT, Exhibit, exhibits

EXHIBITS = exhibits()


def test_names_are_unique() -> None:
    assert len({one.name for one in EXHIBITS}) == len(EXHIBITS)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_an_exhibit_stands_at_one_place(exhibit: Exhibit) -> None:
    texts = {path: path.read_text("utf-8") for path in (ROOT / "megapar").rglob("*.py")}
    for old, new in exhibit.replacements:
        assert old != new
        assert sum(text.count(f"\n{old}") for text in texts.values()) == 1, f"change the exhibit with its code:\n{old}"


def test_killers_are_in_the_suite() -> None:
    """None is in a table, from which .ci/run draws: pytest leaves those out here, too."""
    wanted = sorted({one.killed_by for one in EXHIBITS})
    files = sorted({name.partition("::")[0] for name in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n0", "-p", "no:cacheprovider", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stdout[-2000:]
    assert sorted(set(wanted) - set(found.stdout.splitlines())) == []
