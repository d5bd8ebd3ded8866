"""Every published architecture is what its class in transformers is: the table of architectures and checks.

fp64 on both sides: what differs is an error, not rounding. No bound is wider than those of ``checks.py``; a class that
needs a wider one is refused instead of listed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from megapar.model.architectures import ARCHITECTURES
from tests.model.conformance.case import Case
from tests.model.conformance.checks import CHECKS, Figure
from tests.model.conformance.rows import ROWS, Row

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def _parts(row: Row) -> set[tuple[str, object]]:
    """The parts of a row's class: its implied flags, whether it rotates halves, the factors that it has."""
    architecture = ARCHITECTURES[row.architecture]
    factors = {(name, "given") for name in row.settings if name.endswith(("multiplier", "scaling", "factor"))}
    return {*architecture.flags.items(), ("rotary_halves", architecture.rotary_halves), ("kind", row.kind), *factors}


def _covering() -> list[Row]:
    """First rows of architectures that together have every part of all of them, most new parts first."""
    first = {row.architecture: row for row in reversed(ROWS)}
    missing, chosen = set.union(*map(_parts, first.values())), []
    while missing:
        chosen.append(max(first.values(), key=lambda row: len(_parts(row) & missing)))
        missing -= _parts(chosen[-1])
    return chosen


# The two that train for longest. What a setting or another mixture of the same parts does to logits, losses and
# gradients the suite measures for every row, and leaves these two to ``-m table``.
LONG = ("20 steps", "bf16")
COVERING = _covering()
CELLS = [
    pytest.param(
        *(row, check),
        id=f"{row.name}-{check}",
        marks=[pytest.mark.table] if check in LONG and row not in COVERING else [],
    )
    for row in ROWS
    for check in CHECKS
]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One row after the other, so that all checks of one share its models."""
    return Case(request.param, tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize(("case", "check"), CELLS, indirect=["case"], scope="module")
def test_conformance(case: Case, check: str) -> None:
    found = CHECKS[check](case)
    figures = found if isinstance(found, dict) else {check: found}
    assert {name: f for name, f in figures.items() if isinstance(f, Figure) and not f.holds} == {}


def test_every_architecture_has_a_row() -> None:
    assert {row.architecture for row in ROWS} == ARCHITECTURES.keys()


def test_the_table_is_of_the_pinned_transformers() -> None:
    pinned = re.search(r'"transformers==(\d+\.\d+)\.\*"', PYPROJECT.read_text(encoding="utf-8"))
    assert pinned is not None
    installed = ".".join(transformers.__version__.split(".")[:2])
    assert installed == pinned[1], (
        f"transformers {installed} is installed, and the table is of {pinned[1]}. Install that one (scripts/setup.sh "
        "dev), or compare with the new one: change the pin in pyproject.toml, run scripts/conformance.sh --write "
        "docs/conformance.md, and mend or refuse what differs"
    )
