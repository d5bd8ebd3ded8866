"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest

from megapar.training.reports.terminal import PlainTerminal


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every line that a run says."""
    lines: list[str] = []
    monkeypatch.setattr(PlainTerminal, "print_message", lambda self, text: lines.append(text))
    return lines
