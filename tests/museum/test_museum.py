"""Each exhibit can be made in today's package, and its test is one of those that every change runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.museum.museum import (
    KILLED,
    ROOT,
    SURVIVED,
    Exhibit,
    exhibits,
    nearest,
    package,
    places_of,
    recorded,
    relocated,
)
from tests.museum.page import AREAS, PAGE, page

EXHIBITS = exhibits()
MODULES = package(ROOT)
MOST_SECONDS, LONG_SECONDS, LONG_TESTS = 20, 60, 10  # as recorded: beside another one, twice what a test takes alone


def test_names_are_unique() -> None:
    assert len({one.name for one in EXHIBITS}) == len(EXHIBITS)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_an_exhibit_stands_at_one_place(exhibit: Exhibit) -> None:
    assert exhibit.area in AREAS
    assert exhibit.blind in ("", KILLED, SURVIVED)
    for old, new in exhibit.replacements:
        assert old != new
        assert len(places_of(old, MODULES)) == 1, f"change the exhibit, scripts/museum.sh --relocate helps:\n{old}"


def test_killers_are_in_the_suite() -> None:
    """None is in a table, from which .ci/run draws: pytest leaves those out here, too."""
    wanted = sorted({one.killed_by for one in EXHIBITS})
    files = sorted({name.partition("::")[0] for name in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n0", "-p", "no:cacheprovider", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stdout[-2000:]
    assert sorted(set(wanted) - set(found.stdout.splitlines())) == []


def test_killers_are_fast() -> None:
    assert [one.name for one in EXHIBITS if not 0 < one.seconds <= LONG_SECONDS] == []
    assert len([one.name for one in EXHIBITS if one.seconds > MOST_SECONDS]) <= LONG_TESTS


def test_the_page_has_every_exhibit() -> None:
    assert PAGE.read_text("utf-8") == page(EXHIBITS, MODULES), "run scripts/museum.sh --page"


def test_lines_that_moved_are_found_again() -> None:
    exhibit = next(one for one in EXHIBITS if one.name == "expert-grad-divided")
    assert relocated(exhibit, MODULES) == ""
    (old, _), *_ = exhibit.replacements
    at = places_of(old, MODULES)[0]
    moved = {path: text.replace(old, f"\n\n    {old.replace('span', 'piece')}") for path, text in MODULES.items()}
    found = nearest(old, moved)
    assert (found.path, found.line) == (at.path, at.line + 2)
    assert f"{at.path.name}:{at.line + 2}" in relocated(exhibit, moved)
    twice = {**MODULES, at.path: MODULES[at.path] + "\n" + old}
    assert "add a line of context" in relocated(exhibit, twice)


def test_seconds_are_recorded_in_place() -> None:
    text = "- name: a\n  killed_by: x\n  seconds: 9.0\n  change: |\n    -b\n- name: c\n  change: |\n    -d\n"
    first = text.replace("9.0", "1.2")
    assert recorded(text, "a", 1.24) == first
    assert recorded(first, "c", 2) == first.replace("c\n", "c\n  seconds: 2.0\n")
