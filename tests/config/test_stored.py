"""What a checkpoint's small files say at a glance."""

from __future__ import annotations

import json
from pathlib import Path

from megapar.config.stored import MAX_SCALARS_BYTES, stored_scalars


def test_scalars_with_the_data_of_a_long_run_are_read_and_endless_ones_are_not(tmp_path: Path) -> None:
    source = {"name": "/data/corpora/part-00000.jsonl", "fingerprint": "b" * 32, "weight": "1", "cut": "text"}
    scalars = {"identity": {"phases": [{"sources": [source] * 2000}] * 4}, "iteration": 7}
    (tmp_path / "scalars.json").write_text(json.dumps(scalars, indent=1))
    assert stored_scalars(tmp_path) == scalars
    (tmp_path / "scalars.json").write_text(" " * MAX_SCALARS_BYTES + "{}")
    assert stored_scalars(tmp_path) == {}
