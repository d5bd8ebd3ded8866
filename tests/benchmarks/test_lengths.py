"""Exponents of the length: by their law, and as they were measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.context_parallel.lengths import exponent
from scripts.docs_pictures import LENGTHS, ROOT


def test_a_power_of_the_length_has_its_exponent() -> None:
    assert exponent({2: 24.0, 4: 192.0, 8: 1536.0}) == pytest.approx(3)


def test_a_step_in_a_window_grows_with_the_length_from_2k_to_32k() -> None:
    """In seconds and in bytes, as the picture has it; without a window seconds grow faster."""
    result = json.loads((ROOT / "benchmarks" / "context_parallel" / "results" / LENGTHS).read_text(encoding="utf-8"))
    window, full = result["measured"].values()
    assert [*window["seconds"]] == [str(2048 << doubling) for doubling in range(5)]
    for kind, figures in window.items():
        found = exponent({int(length): figure for length, figure in figures.items()})
        assert found == pytest.approx(result["exponents"]["window 128"][kind])
        assert found <= 1.1
    assert exponent({int(length): figure for length, figure in full["seconds"].items()}) > 1.5
