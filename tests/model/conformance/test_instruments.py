"""The instruments of the table find what they are for."""

from __future__ import annotations

from pathlib import Path

from tests.model.conformance import theirs
from tests.model.conformance.case import Case
from tests.model.conformance.checks import OUTPUTS, RAW
from tests.model.conformance.exact import NarrowMade
from tests.model.conformance.rows import ROWS


def test_without_the_mode_a_class_in_fp64_is_not_exact(tmp_path: Path) -> None:
    """What the exact column is for, and that it sees what is narrower than fp64."""
    case = Case(ROWS[0], tmp_path)
    batch, seen = case.batches[0], NarrowMade()
    double = theirs.Published(case.row, case.exact().model).answer(batch, seen)
    error = float((double.logits - case.exact_answers[0].logits).abs().max())
    assert OUTPUTS < error / float(double.logits.abs().max()) < RAW
    assert any("float32" in name for name in seen.operators)
