"""Checkpoints of every format version, kept for ever, load for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.checkpoints.save_load import folder as folders
from tests.checkpoints.save_load.states import SCALARS, load_on
from tests.support.ranks import run_ranks

VERSIONS = sorted((Path(__file__).parent / "golden").iterdir())


@pytest.mark.parametrize("root", VERSIONS, ids=lambda root: root.name)
def test_a_golden_checkpoint_loads_on_one_process_and_on_others(root: Path) -> None:
    folder = folders.find(root)
    assert load_on(0, 1, folder, "one") == ([], SCALARS)
    assert run_ranks(2, load_on, folder, "columns") == [([], SCALARS)] * 2


def test_there_is_one_for_each_version() -> None:
    from megapar.checkpoints.format.layout import VERSION

    assert [root.name for root in VERSIONS] == [f"version_{number}" for number in range(1, VERSION + 1)]
