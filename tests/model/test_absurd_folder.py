"""Any header, index or JSON beside a published model: read, or refused by CheckpointError, before room is made."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megapar.errors import CheckpointError
from megapar.files.tensor_file import INDEX_FILE
from megapar.model.hugging_face.folder import HfFolder

MAX_MEMORY = 8 << 20
DATA = bytes(range(64))
ODD = (2**31, 2**60, 2**63 - 1, 2**64, 10**30, True, None, 1.5, "4")
NUMBERS = st.one_of(st.integers(-1, 70), st.sampled_from(ODD))
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "BOOL", "F8_E4M3", "", "X" * 5000, 7, None]),
        "shape": st.one_of(st.lists(NUMBERS, max_size=4), NUMBERS),
        "data_offsets": st.one_of(st.tuples(NUMBERS, NUMBERS), st.lists(NUMBERS, max_size=3)),
    },
)
GOOD = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.sampled_from(["a.safetensors", "../b"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


def _file(path: Path, header: bytes, claimed: int | None = None) -> None:
    path.write_bytes((len(header) if claimed is None else claimed).to_bytes(8, "little") + header + DATA)


def _read(folder: Path) -> dict[str, torch.Tensor] | None:
    """All tensors, or None where the folder was refused; nothing larger than the file is ever asked for."""
    room, asked = torch.empty, []

    def watched(shape: Any, **options: Any) -> torch.Tensor:
        asked.append(torch.Size(shape).numel())
        assert asked[-1] <= len(DATA), f"room for {asked[-1]} elements"
        return room(shape, **options)

    tracemalloc.start()
    refusal = ""
    try:
        with patch("torch.empty", watched):
            found = HfFolder(folder)
            tensors = {name: found.whole(name) for name in found.tensors}
    except CheckpointError as error:
        refusal = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_MEMORY
    assert len(refusal) < 2000
    assert not refusal or str(folder) in refusal
    return None if refusal else tensors


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.dictionaries(st.text(max_size=5), st.one_of(ENTRIES, st.just(GOOD), JSON), max_size=4))
@example(entries={"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}})
@example(entries={"a": {"dtype": "U8", "shape": [2**32, 2**32], "data_offsets": [0, 64]}})
@example(entries={"a": {"dtype": "F32", "shape": [2**60, 0], "data_offsets": [0, 0]}})
def test_any_entries_of_a_header(tmp_path: Path, entries: dict[str, Any]) -> None:
    _file(tmp_path / "model.safetensors", json.dumps(entries).encode())
    found = _read(tmp_path)
    if found is not None:
        assert set(found) == set(entries) - {"__metadata__"}
        assert all(list(tensor.shape) == entries[name]["shape"] for name, tensor in found.items())
    elif list(entries.values()) in ([], [GOOD]):  # two would lie in the same bytes
        raise AssertionError("a good file was refused")


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode())),
    claimed=st.one_of(st.none(), st.integers(0, 200), st.sampled_from([10**8 + 1, 2**60, 2**63, 2**64 - 1])),
)
@example(header=b"[" * 50_000, claimed=None)
@example(header=b'{"a":' * 50_000, claimed=None)
@example(header=b"9" * 50_000, claimed=None)
def test_any_bytes_as_a_header(tmp_path: Path, header: bytes, claimed: int | None) -> None:
    _file(tmp_path / "model.safetensors", header, claimed)
    _read(tmp_path)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(index=st.one_of(JSON, st.builds(lambda value: {"weight_map": value}, JSON)))
@example(index={"weight_map": {"a": "a.safetensors"}})
@example(index={"weight_map": {"a": ["a.safetensors"]}})
@example(index={"weight_map": {"a": "..", "b": "a.safetensors\0"}})
def test_any_json_as_an_index(tmp_path: Path, index: Any) -> None:
    _file(tmp_path / "a.safetensors", json.dumps({"a": GOOD}).encode())
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    found = _read(tmp_path)
    if index == {"weight_map": {"a": "a.safetensors"}}:
        assert found is not None
