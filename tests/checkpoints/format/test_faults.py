"""Records of faults and names of checkpoints that were set aside: whatever stands in them, it is read or refused."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.arguments import parse
from megapar.checkpoints.format.faults import NEVER, RECORD, Blamed, Fault, fault_of, read_fault, suspects
from megapar.errors import ConfigError, UnverifiedError
from megapar.files.location import at

FAULT = Fault("replicas", 5, 2, {"replicas": 4, "recompute": NEVER}, (Blamed(1, "n", "cpu"),), ("a.b",), "it differs")


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(json.dumps(FAULT.to_json()))
    assert read_fault(tmp_path) == FAULT
    assert FAULT.limit == 4
    assert str(FAULT) == (
        "after iteration 5 the check 'replicas' found wrong numbers: rank 1 on node n, device cpu. Last passed at "
        "iteration: recompute never, replicas 4"
    )


def test_where_nothing_is_recorded_there_is_no_fault(tmp_path: Path) -> None:
    assert read_fault(tmp_path) is None
    assert read_fault(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "change", [{"iteration": -1}, {"iteration": True}, {"verified": {"a": 1.5}}, {"blamed": [1]}, {"check": None}]
)
def test_a_record_that_is_none_is_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(json.dumps(FAULT.to_json() | change))
    with pytest.raises(
        UnverifiedError, match=r"corruption\.json records that a run found wrong numbers, and cannot be"
    ):
        read_fault(tmp_path)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(UnverifiedError, match="not a regular file"):
        read_fault(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(FAULT.to_json())), inner),
    max_leaves=20,
)


@given(json_values)
def test_any_json_is_a_fault_or_a_value_error(value: Any) -> None:
    with suppress(ValueError):
        assert isinstance(fault_of(value), Fault)


def test_the_last_of_one_iteration_and_of_the_newest_owner_counts(tmp_path: Path) -> None:
    last = ["iter_0000002.e3.suspect", "iter_0000004.suspect-2", "iter_0000005.e12.suspect"]
    others = ["iter_0000004.suspect", "iter_0000005.suspect", "iter_0000005.e2.suspect-2", "iter_0000006", "x.suspect"]
    for name in (*last, *others):
        (tmp_path / name).mkdir()
    assert suspects(tmp_path) == {int(name[11]): at(tmp_path) / name for name in last}
    assert suspects(tmp_path / "nowhere") == {}


def test_a_folder_of_suspects_alone_is_gone_on_from_by_name_only(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004.suspect").mkdir()
    (tmp_path / "iter_0000004.suspect" / "layout.json").write_text("{}")
    line = ["--load", str(tmp_path), "--save", str(tmp_path), "--mock-data"]
    with pytest.raises(ConfigError, match=r"contains only checkpoints that were set aside.*iter_0000004\.suspect"):
        parse("moe", line, {})
    with pytest.raises(ConfigError, match="no checkpoint of --ckpt-step 5"):
        parse("moe", ["--load", str(tmp_path), "--ckpt-step", "5", "--mock-data"], {})
    assert parse("moe", ["--load", str(tmp_path), "--ckpt-step", "4", "--mock-data"], {}).checkpoint.ckpt_step == 4
