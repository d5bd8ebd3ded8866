"""Which package named apex is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.core.device.apex import apex_installed


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], ""),
        (["apex/__init__.py", "apex/optimizers/__init__.py"], "is installed and not used"),
        (["apex/__init__.py", "apex/models.py"], "not NVIDIA's package but PyPI's of the same name"),
    ],
)
def test_it_is_recognised_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], said: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said in apex_installed()
    assert bool(apex_installed()) == bool(files)
