"""A flag that is accepted does something: every one, alone, shows where its row says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.arguments import FLAGS
from tests.flags.materials import make, seen_of
from tests.flags.observe import NAMES, Seen
from tests.flags.table import COMMON, EXEMPT, ROWS, SHOWN, SMALL, TOGETHER, Row

MOST_EXEMPT = 40
ROOT = Path(__file__).parents[2]


def test_every_flag_has_a_row_or_a_reason() -> None:
    assert sum(len(names.split()) for names in TOGETHER) == len(SHOWN)
    assert SHOWN.keys() | EXEMPT.keys() <= FLAGS.keys()
    assert not SHOWN.keys() & EXEMPT.keys()
    assert {row.name for row in ROWS} == FLAGS.keys() - EXEMPT.keys()
    assert len(EXEMPT) <= MOST_EXEMPT
    assert all(reason and (ROOT / test).exists() for reason, test in EXEMPT.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_gives_another_value_than_the_run_without_it(row: Row) -> None:
    before = {
        **{name: flag.defaults[row.kind] for name, flag in FLAGS.items()},
        **SMALL[row.kind],
        **COMMON,
        **row.base,
    }
    assert row.value != before[row.name]
    assert row.shows in NAMES
    assert row.kind in FLAGS[row.name].models


@pytest.fixture(scope="session")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    make(folder)
    return folder


@pytest.fixture(scope="session")
def without() -> dict[str, Seen]:
    """Runs without a flag, which several rows are compared with."""
    return {}


@pytest.mark.flags
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_flag_shows(row: Row, materials: Path, without: dict[str, Seen], tmp_path: Path) -> None:
    key = str((row.world, row.kind, sorted(row.base.items(), key=str)))
    if key not in without:
        without[key] = seen_of(row.world, row.kind, row.base, materials, tmp_path / "without")
    before = without[key]
    assert not before.refused, before.error
    flags = {**row.base, **row.needs, row.name: row.value}
    after = seen_of(row.world, row.kind, flags, materials, tmp_path / "with")
    assert row.shows == "refused" or not after.refused, after.error
    assert row.shows in ("error", "refused") or not after.error, after.error
    assert getattr(after, row.shows) != getattr(before, row.shows), f"{row} changes no {row.shows}"


@pytest.mark.flags
@pytest.mark.parametrize(("world", "kind"), [(1, "moe"), (2, "moe"), (1, "ernie")])
def test_the_same_flags_show_the_same(world: int, kind: str, materials: Path, tmp_path: Path) -> None:
    """Else a difference would say nothing."""
    first, second = (seen_of(world, kind, {}, materials, tmp_path / name) for name in ("first", "second"))
    assert all((first.steps, first.order, first.lines, first.weights))
    assert first == second
