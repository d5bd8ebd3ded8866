"""Whatever bytes a stranger puts into layout.json or a shard: CheckpointError or a sound answer, nothing else."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.checkpoints.format import layout as layout_file
from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.names import LAYOUT_FILE
from megapar.checkpoints.format.shards import Shard, ShardFile
from megapar.checkpoints.format.tiling import from_json, from_runs, tile, to_runs
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load.planner import find_reads
from megapar.core.box import Box
from megapar.errors import CheckpointError

NUMBERS = st.integers(-3, 12) | st.sampled_from([1 << 31, 1 << 60, 1 << 64, -(1 << 70)])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
RUNS = st.lists(st.lists(NUMBERS, min_size=3, max_size=3) | JSON, max_size=3)
SHAPE = st.lists(st.integers(0, 6), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    shape = draw(SHAPE | JSON)
    dims = len(shape) if isinstance(shape, list) else 1
    starts = st.lists(RUNS, min_size=dims, max_size=dims)
    rows = st.lists(st.lists(NUMBERS, min_size=1 + 2 * dims, max_size=1 + 2 * dims), max_size=4)
    tensor = {"shape": shape, "dtype": draw(st.sampled_from(["float32", "int8", "object"]) | JSON)}
    return tensor | draw(
        st.fixed_dictionaries({"starts": starts | JSON, "files": RUNS | JSON}) | st.fixed_dictionaries({"pieces": rows})
    )


FILES = st.tuples(
    st.sampled_from(["a", "b", "../a", "c.safetensors"]) | JSON, NUMBERS | JSON, st.just("0" * 64) | JSON
).map(list)
LAYOUTS = st.fixed_dictionaries(
    {},
    optional={
        "format": st.just(layout_file.FORMAT),
        "version": st.just(1) | JSON,
        "model": st.just({}) | JSON,
        "grid": st.just({}) | JSON,
        "scalars": st.just(["s.json", 2, "0" * 64]) | FILES,
        "tensors": st.dictionaries(st.sampled_from(["x", "y"]), tensors() | JSON, max_size=2) | JSON,
        "files": st.lists(FILES, max_size=3) | JSON,
    },
)


def read_all(content: bytes) -> None:
    """Every small tensor of a layout is refused, or its reads have each of its elements once."""
    try:
        layout = layout_file.parse_layout(content)
    except CheckpointError:
        return
    for entry in layout.tensors.values():
        if sum(entry.shape) < 100:
            with contextlib.suppress(CheckpointError):
                reads = find_reads(layout, Shard.whole(entry.name, torch.zeros(entry.shape, dtype=entry.dtype)))
                assert sum(read.part.numel for read in reads) == int(np.prod(entry.shape))


@settings(max_examples=400, deadline=None)
@given(root=LAYOUTS | JSON, box=st.tuples(SHAPE, SHAPE))
def test_any_json_is_a_layout_or_an_error(root: Any, box: tuple[list[int], list[int]]) -> None:
    content = layout_file.seal(json.dumps(root)[1:].encode()) if isinstance(root, dict) else json.dumps(root).encode()
    read_all(content)


@st.composite
def sound_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Layouts that are right but for one spot: they get deeper than those of random parts."""
    root: dict[str, Any] = {
        "format": layout_file.FORMAT,
        "version": 1,
        "model": {},
        "grid": {},
        "scalars": ["s.json", 2, "0" * 64],
        "tensors": {
            "x": {"shape": [4, 4], "dtype": "float32", "starts": [[[0, 2, 2]], [[0, 0, 1]]], "files": [[0, 1, 2]]},
            "y": {"shape": [4], "dtype": "int8", "pieces": [[0, 0, 1], [1, 1, 3]]},
        },
        "files": [["a", 10, "0" * 64], ["b", 10, "0" * 64]],
    }
    spot: Any = root
    for _ in range(draw(st.integers(0, 5))):
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = draw(st.sampled_from(keys))
        if not isinstance(spot[key], dict | list) or not spot[key] or draw(st.integers(0, 3)) == 0:
            spot[key] = draw(JSON | NUMBERS)
            break
        spot = spot[key]
    return root


@settings(max_examples=400, deadline=None)
@given(root=sound_layouts())
def test_one_wrong_spot_is_an_error_or_harmless(root: dict[str, Any]) -> None:
    read_all(layout_file.seal(json.dumps(root)[1:].encode()))


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_any_bytes_are_refused_as_a_layout(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        layout_file.parse_layout(content)
    with pytest.raises(CheckpointError):
        layout_file.parse_layout(layout_file.seal(content))


@settings(max_examples=200, deadline=None)
@given(
    header=st.binary(max_size=60)
    | st.dictionaries(st.just("x"), JSON, max_size=1).map(lambda h: json.dumps(h).encode()),
    length=st.none() | st.integers(0, (1 << 64) - 1) | st.integers(0, 64),
    data=st.binary(max_size=20),
)
def test_any_bytes_are_refused_as_a_shard(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, length: int | None, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    with pytest.raises(CheckpointError), ShardFile(path) as shards:
        shards.read("x", Box((0,), (5,)), Box((1,), (3,)), torch.zeros(3))


def test_deep_and_huge_json_is_refused() -> None:
    for content in (b"[" * 1_000_000, b'{"a":' * 100_000, b"9" * 1_000_000, b'{"version": ' + b"9" * 10_000 + b"}"):
        with pytest.raises(CheckpointError):
            layout_file.parse_layout(content)


@settings(max_examples=200, deadline=None)
@given(numbers=st.lists(st.integers(0, 20), max_size=30) | st.lists(st.integers(0, 2), max_size=30))
def test_runs_give_back_their_numbers(numbers: list[int]) -> None:
    runs = to_runs(np.array(numbers, dtype=np.int64))
    assert from_runs("x", json.loads(json.dumps(runs))).tolist() == numbers
    assert len(runs) <= max(1, (len(numbers) + 1) // 2) or not numbers


def cut_at_random(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """A tiling by random cuts of random boxes: mostly no grid."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not dims or depth == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    parts = [box.cut(dim, 2, part) for part in range(2)]
    return [piece for part in parts for piece in cut_at_random(draw, part, draw(st.integers(0, depth - 1)))]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return shape, draw(st.permutations(cut_at_random(draw, Box.whole(shape), 4))), Box(offsets, sizes)


@settings(max_examples=300, deadline=None)
@given(case=tilings())
def test_the_search_finds_exactly_the_pieces_that_meet_a_box(case: tuple[tuple[int, ...], list[Box], Box]) -> None:
    shape, pieces, box = case
    made = tile("x", shape, range(len(pieces)), pieces)
    read = from_json("x", shape, json.loads(json.dumps(made.to_json())), len(pieces))
    for tiling in (made, read):
        found = sorted(tiling.meeting(box), key=lambda pair: pair[0])
        assert found == [(i, piece) for i, piece in enumerate(pieces) if piece.meet(box) is not None]
    for left_out in range(len(pieces)):
        rest = pieces[:left_out] + pieces[left_out + 1 :]
        with pytest.raises(CheckpointError):
            tile("x", shape, range(len(rest)), rest)
    if len(pieces) > 1:
        with pytest.raises(CheckpointError):
            tile("x", shape, range(len(pieces)), [pieces[0], *pieces[:-1]])


def test_a_written_layout_is_read_as_it_was(tmp_path: Path) -> None:
    state = {"a": Shard.whole("a", torch.zeros(3)), 'näme "\\': Shard.whole('näme "\\', torch.zeros(()))}
    collective_io.save(tmp_path / "c", state, {}, layout={"model": {"ä": "\n"}, "grid": {}}, group=None)
    layout = read_layout(tmp_path / "c")
    assert layout.to_bytes() == (tmp_path / "c" / LAYOUT_FILE).read_bytes()
    assert set(layout.tensors) == set(state)
    assert layout.model == {"ä": "\n"}
