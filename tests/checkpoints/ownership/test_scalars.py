"""Scalars of checkpoints that no run has written are refused with all that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.checkpoints.format.layout import FileEntry
from megapar.checkpoints.format.shards import read_scalars, write_bytes
from megapar.checkpoints.ownership.scalars import check_scalars
from megapar.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint" / "iter_0000002" / "scalars.json"
SOUND: dict[str, Any] = {
    **json.loads(GOLDEN.read_text()),
    "loss_scale": {"value": 2.0**16, "good_steps": 3, "chances": 2},
    "verified": {"replicas": 2},
    "expert_places": {"now": [], "next": [[1, 0]]},
}
ODD = (
    st.none() | st.booleans() | st.text(max_size=3) | st.integers() | st.floats() | st.lists(st.integers(), max_size=2)
)


def refusal(scalars: dict[str, Any], iteration: int | None = 2, *, optimizer: bool = True) -> str:
    """What is said against these scalars; nothing where they are taken."""
    try:
        check_scalars("iter_0000002", scalars, iteration, optimizer=optimizer)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_runs_write_is_taken() -> None:
    oldest = {"iteration": 2, "consumed_samples": 4, "optimizer_steps": 2, "schedule": {}}
    assert refusal(SOUND) == refusal(oldest) == ""
    assert refusal({"iteration": 2, "consumed_samples": 4}, None, optimizer=False) == ""


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"consumed_samples": -5}, "consumed_samples is -5, where a whole number from 0 on"),
        ({"dropout_seed": float("inf")}, "dropout_seed is inf"),
        ({"dropout_seed": 10**400}, "a number of about 401 digits"),
        ({"schedule": {"lr": 10**400}}, "schedule is"),
        ({"spikes": {"losses": [10**400], "norms": []}}, "spikes.losses is"),
        ({"iteration": 3}, "iteration is 3, and the folder is that of iteration 2"),
        ({"iteration": True}, "iteration is True"),
        ({"iteration": 2.0}, "iteration is 2.0"),
        ({"optimizer_steps": "2"}, "optimizer_steps is '2'"),
        ({"schedule": [1]}, r"schedule is \[1\]"),
        ({"schedule": {"peak": float("nan")}}, "schedule is {'peak': nan}"),
        ({"loss_scale": 1.0}, "loss_scale is 1.0, where an object"),
        ({"loss_scale": {"value": 0.0}}, "loss_scale.good_steps is missing; .*loss_scale.value is 0.0"),
        ({"spikes": {"losses": [1, None], "norms": []}}, "spikes.losses is"),
        ({"spikes": {"losses": [], "norms": [], "in_a_row": "x"}}, "spikes.in_a_row is 'x'"),
        ({"skip_samples": [[5, 2]]}, "skip_samples is"),
        ({"skip_samples": {"a": 1}}, "skip_samples is"),
        ({"verified": {"replicas": -2}}, "verified is"),
        ({"expert_places": {"next": [[0, -1]]}}, "expert_places is"),
        ({"expert_places": [[0, 1]]}, "expert_places is"),
    ],
)
def test_what_no_run_writes_is_refused(other: dict[str, Any], said: str) -> None:
    assert re.search(said, refusal({**SOUND, **other}))


def test_all_that_is_wrong_is_told_at_once() -> None:
    said = refusal({"consumed_samples": -1, "micro_batches": "x" * 10**6})
    assert said.startswith("iter_0000002 has scalars that no run wrote: iteration is missing; optimizer_steps is ")
    assert "schedule is missing; consumed_samples is -1" in said
    assert len(said) < 1000


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(SOUND)), value=ODD)
def test_any_value_is_taken_or_refused(name: str, value: Any) -> None:
    said = refusal({**SOUND, name: value})
    assert not said or f"no run wrote: {name}" in said


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_none_are_refused_wherever_they_stand(tmp_path: Path, number: str) -> None:
    entry: FileEntry = write_bytes(tmp_path / "scalars.json", f'{{"identity": [{{"a": {number}}}]}}'.encode())
    with pytest.raises(CheckpointError, match="is not a number that a run saves"):
        read_scalars(tmp_path, entry, "full")
