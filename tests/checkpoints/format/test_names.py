"""Which checkpoint is the latest, by the words of several owners, old versions and people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapar.checkpoints.format.names import (
    LAYOUT_FILE,
    MOST_SCALARS_BYTES,
    SCALARS_FILE,
    holds_checkpoints,
    is_part,
    iteration_name,
    newest_name,
    parse_checkpoint_name,
    read_latest,
    shard_name,
    stored_scalars,
)


def test_names_of_checkpoints_and_of_nothing_else() -> None:
    assert parse_checkpoint_name(iteration_name(20)) == (20, 0)
    assert parse_checkpoint_name(iteration_name(20, 3)) == (20, 3) == parse_checkpoint_name("iter_0000020.e3")
    for name in ("iter_20", "iter_0000020.e", "iter_0000020.e0", "iter_0000020.tmp-0123456789ab", "iter_0000020\n"):
        assert parse_checkpoint_name(name) is None


def test_names_of_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    assert all(is_part(name) for name in (SCALARS_FILE, shard_name(0), shard_name(123456)))
    assert not any(is_part(name) for name in (LAYOUT_FILE, "scalars_json", "shard-.safetensors", "model.safetensors"))
    (tmp_path / "iter_0000020").mkdir()
    assert not holds_checkpoints(tmp_path)
    (tmp_path / "iter_0000020" / LAYOUT_FILE).touch()
    assert holds_checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("latest", "owners", "found"),
    [
        (None, {}, None),
        ("iter_0000020\n", {}, ("iter_0000020", 0)),  # of an old version
        ("iter_0000020 1\n", {1: "iter_0000020 1"}, ("iter_0000020", 1)),
        ("iter_0000040 1\n", {2: "iter_0000030 2"}, ("iter_0000030", 2)),  # the first owner woke up late
        ("iter_0000040 2\n", {1: "iter_0000050 1"}, ("iter_0000040", 2)),
        ("iter_0000040 1\n", {2: "garbage", 3: ""}, ("iter_0000040", 1)),
        ("iter_0000020\n", {2: "iter_0000030 2"}, ("iter_0000020", 0)),  # a person's
        ("iter_0000020.e2 2\n", {}, ("iter_0000020.e2", 2)),
        ("garbage", {2: "iter_0000030 2"}, ("garbage", 0)),
        ("", {}, ("", 0)),
    ],
)
def test_the_highest_epoch_is_the_latest(
    tmp_path: Path, latest: str | None, owners: dict[int, str], found: tuple[str, int] | None
) -> None:
    (tmp_path / "owner").mkdir()
    for epoch, text in owners.items():
        (tmp_path / "owner" / f"{epoch}.latest").write_text(text)
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert read_latest(tmp_path) == found


def test_the_newest_of_an_iteration(tmp_path: Path) -> None:
    assert newest_name(tmp_path, 20) == "iter_0000020"
    for name in ("iter_0000020", "iter_0000020.e9", "iter_0000020.e10", "iter_0000020.tmp-0123456789ab-e11"):
        (tmp_path / name).mkdir()
    assert newest_name(tmp_path, 20) == "iter_0000020.e10"


def test_scalars_with_the_data_of_a_long_run_are_read_and_endless_ones_are_not(tmp_path: Path) -> None:
    source = {"name": "/data/corpora/part-00000.jsonl", "fingerprint": "b" * 32, "weight": "1", "cut": "text"}
    scalars = {"identity": {"phases": [{"sources": [source] * 2000}] * 4}, "iteration": 7}
    (tmp_path / "scalars.json").write_text(json.dumps(scalars, indent=1))
    assert stored_scalars(tmp_path) == scalars
    (tmp_path / "scalars.json").write_text(" " * MOST_SCALARS_BYTES + "{}")
    assert stored_scalars(tmp_path) == {}
