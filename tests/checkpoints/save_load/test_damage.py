"""Damaged, incomplete, foreign and hostile checkpoints: one clear error, and no target touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.checkpoints.format import layout as layout_file
from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.names import LAYOUT_FILE
from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.save_load import collective_io
from megapar.core.box import Box
from megapar.errors import CheckpointError
from megapar.files.location import Location, at
from megapar.model.facts import differences
from megapar.model.sizes import ModelSizes
from megapar.schema.flag import spellings_of
from tests.checkpoints.save_load.states import MODEL, load_on, make_state, same_model, save_on, untouched
from tests.model.small import DENSE, ERNIE, MOE
from tests.support.damage import cut, flip_bit
from tests.support.ranks import run_ranks
from tests.support.stores import put

SHARD = "shard-00001.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "c"
    run_ranks(2, save_on, folder, "rows")
    return folder


@pytest.fixture
def folder(sound: Path, store_root: Location) -> Location:
    for path in sound.iterdir():
        put(store_root / "c" / path.name, path.read_bytes())
    return store_root / "c"


def refused(folder: Location, verify: Any = "full", targets: dict[str, Shard] | None = None, **options: Any) -> str:
    """The error of a load, after which no target may have changed."""
    state = make_state("one", 0, filled=False) if targets is None else targets
    options = {"expect_model": same_model(MODEL), **options}
    with pytest.raises(CheckpointError) as caught:
        collective_io.load(folder, state, verify=verify, group=None, **options)
    assert untouched(state)
    return str(caught.value)


def edit_layout(folder: Location, change: Callable[[dict[str, Any]], None]) -> None:
    """Change layout.json and make its own checksum right again."""
    path = folder / LAYOUT_FILE
    root = json.loads(path.content())
    change(root)
    del root["sha256"]
    put(path, layout_file.seal(json.dumps(root)[1:].encode()))


@pytest.mark.parametrize("verify", ["full", "size", "off"])
def test_a_deleted_shard_is_missing(folder: Location, verify: str) -> None:
    (folder / SHARD).remove()
    assert f"{folder} is damaged or incomplete: {SHARD} is missing" in refused(folder, verify)


@pytest.mark.parametrize(
    ("size", "verify", "told"),
    [*((-1, way, "bytes instead of") for way in ("full", "size")), *((n, "off", SHARD) for n in (0, 4, 8, 100, -1))],
)
def test_a_truncated_shard_is_noticed(folder: Location, size: int, verify: str, told: str) -> None:
    cut(folder / SHARD, size)
    assert told in refused(folder, verify)


@pytest.mark.parametrize("name", [SHARD, "scalars.json"])
def test_a_flipped_bit_is_found_by_sha256(folder: Location, name: str) -> None:
    flip_bit(folder / name, -2)
    assert f"{name} is damaged: its SHA-256 is not the one of layout.json" in refused(folder)


def test_verification_can_be_reduced(folder: Location) -> None:
    flip_bit(folder / SHARD, -1)
    assert load_on(0, 1, folder, "one", verify="size")[0] != []
    put(folder / SHARD, (folder / SHARD).content() + b"more")
    assert "bytes instead of" in refused(folder, "size")
    assert load_on(0, 1, folder, "one", verify="off")[0] != []


def test_every_bit_of_the_layout_counts(folder: Location) -> None:
    path = folder / LAYOUT_FILE
    whole = path.content()
    for position in range(0, len(whole), 37):
        flip_bit(path, position)
        with pytest.raises(CheckpointError, match=r"layout\.json"):
            read_layout(folder)
        put(path, whole)
    for size in range(0, len(whole), 41):
        put(path, whole[:size])
        with pytest.raises(CheckpointError, match=r"layout\.json"):
            read_layout(folder)


@pytest.mark.parametrize("name", ["layout.json", "scalars.json"])
def test_a_missing_json_file_is_named(folder: Location, name: str) -> None:
    (folder / name).remove()
    assert name in refused(folder)


def test_a_folder_that_is_none_is_no_checkpoint(store_root: Location) -> None:
    assert "is not a checkpoint: it has no layout.json" in refused(store_root / "nowhere")


def test_another_model_is_named_by_its_facts(folder: Location) -> None:
    error = refused(folder, expect_model=same_model({**MODEL, "hidden_size": 16, "new": 1}))
    assert "is a checkpoint of another model: hidden_size is 8 there and 16 here; new is none there and 1 here" in error


@pytest.mark.parametrize("sizes", [DENSE, MOE, ERNIE], ids=["dense", "experts", "ernie"])
def test_a_size_that_is_newer_than_the_checkpoint_has_its_default_there(sizes: ModelSizes) -> None:
    facts, defaults = json.loads(json.dumps(sizes.facts())), type(sizes).fact_defaults()
    newer = [name for name in facts if name in defaults and facts[name] == defaults[name]]
    assert newer
    assert differences({name: value for name, value in facts.items() if name not in newer}, facts) == ""
    older = {name: value for name, value in facts.items() if name != newer[0]}
    name = spellings_of(type(sizes)).get(newer[0], newer[0])
    assert differences(older, {**facts, newer[0]: "other"}) == f"{name} is none there and other here"
    assert differences({**facts, newer[0]: None}, facts) == f"{name} is none there and {facts[newer[0]]} here"


def test_newer_sizes_of_experts_have_their_defaults_too() -> None:
    facts = json.loads(json.dumps(MOE.facts()))
    older = {**facts, "moe": {name: value for name, value in facts["moe"].items() if name not in ("score", "topk")}}
    assert differences(older, facts) == "--moe-router-topk is none there and 2 here"
    dense = json.loads(json.dumps({**facts, "moe": None}))
    assert differences(facts, dense) == "moe is given there and none here"
    assert differences(dense, facts) == "moe is none there and given here"


def test_facts_of_absurd_numbers_are_compared_at_once() -> None:
    facts = json.loads(json.dumps(MOE.facts()))
    assert differences({**facts, "num_layers": 10**15, "moe_widths": [1]}, facts).count(" there and ") == 2


def test_missing_and_surplus_tensors_are_listed(folder: Location) -> None:
    state = make_state("one", 0, filled=False)
    more = {**state, "model/more": Shard.whole("model/more", torch.ones(2))}
    assert "does not contain tensors that this run has: model/more" in refused(folder, targets=more)
    fewer = {name: shard for name, shard in state.items() if not name.startswith("optimizer/")}
    error = refused(folder, targets=fewer)
    assert "contains tensors that this run does not have: optimizer/mask, optimizer/step" in error
    collective_io.load(folder, fewer, expect_model=same_model(MODEL), ignore=("optimizer/",), group=None)
    assert not untouched(fewer)


def test_long_lists_are_shortened(folder: Location) -> None:
    state = {f"t{i:02}": Shard.whole(f"t{i:02}", torch.ones(1)) for i in range(40)}
    assert refused(folder, targets=state).endswith("t10, t11 and 28 more")


@pytest.mark.parametrize("tensor", [torch.ones(6, 8), torch.ones(8, 6, dtype=torch.float64), torch.ones(8)])
def test_another_shape_or_dtype_is_told_with_both(folder: Location, tensor: torch.Tensor) -> None:
    state = make_state("one", 0, filled=False) | {"model/weight": Shard.whole("model/weight", tensor)}
    error = refused(folder, targets=state)
    assert f"model/weight is [8, 6] float32 there and {list(tensor.shape)} {str(tensor.dtype)[6:]} here" in error


@pytest.mark.parametrize("name", ["../c/shard-00001.safetensors", "/etc/passwd", ".hidden", "a/b", "", "layout.json"])
def test_file_names_that_lead_elsewhere_are_refused(folder: Location, name: str) -> None:
    edit_layout(folder, lambda root: root["files"][1].__setitem__(0, name))
    refused(folder)


def test_a_fifo_in_place_of_a_shard_does_not_hang(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "c")
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    assert f"{SHARD} is missing" in refused(at(folder))


WEIGHT = {"shape": [8, 6], "dtype": "float32"}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (WEIGHT | {"pieces": [[0, 0, 0, 4, 6]]}, "model/weight: stored pieces hold 24 of the 48 elements"),
        (WEIGHT | {"pieces": [[0, 0, 0, 4, 6], [1, 2, 0, 4, 6]]}, "some of them twice"),  # which hides a hole
        (WEIGHT | {"starts": [[[0, 4, 2]]], "files": [[0, 1, 2]]}, ""),
        (WEIGHT | {"starts": [[[1, 4, 2]], [[0, 0, 1]]], "files": [[0, 1, 2]]}, ""),
        (WEIGHT | {"starts": [[[0, 0, 2]], [[0, 0, 1]]], "files": [[0, 1, 2]]}, ""),
        (WEIGHT | {"starts": [[[0, 8, 2]], [[0, 0, 1]]], "files": [[0, 1, 2]]}, ""),
        (WEIGHT | {"starts": [[[0, 4, 2]], [[0, 0, 1]]], "files": [[0, 1, 3]]}, ""),
        (WEIGHT | {"starts": [[[0, 4, 2]], [[0, 0, 1]]], "files": [[0, 2, 2]]}, ""),
        (WEIGHT | {"starts": [[[0, 4, 2]], [[0, 0, 1]]], "files": [[0, -1, 2]]}, ""),
        (WEIGHT | {"starts": [[[0, 1, 1 << 60]], [[0, 0, 1]]], "files": [[0, 0, 1 << 60]]}, ""),
        (WEIGHT | {"starts": [[], [[0, 0, 1]]], "files": []}, ""),
        (WEIGHT | {"starts": [[[0, 4, True]], [[0, 0, 1]]], "files": [[0, 1, 2]]}, ""),
        (WEIGHT | {"pieces": [[0, 0, 0, 4, 7]]}, ""),
        (WEIGHT | {"pieces": [[2, 0, 0, 8, 6]]}, ""),
        (WEIGHT | {"pieces": [[0, 0, 0, 8]]}, ""),
        (WEIGHT | {"pieces": [[0, 0, 0, 1 << 80, 6]]}, ""),
        (WEIGHT | {"pieces": {}}, ""),
        (WEIGHT, ""),
        ({"shape": [-1], "dtype": "float32"}, ""),
        ({"shape": [1 << 40, 1 << 40], "dtype": "int8"}, ""),
        ({"shape": [2]}, ""),
        ([], ""),
    ],
)
def test_tensors_that_cannot_be_are_refused_before_loading(folder: Location, entry: Any, said: str) -> None:
    edit_layout(folder, lambda root: root["tensors"].__setitem__("model/weight", entry))
    error = refused(folder)
    assert "model/weight" in error
    assert said in error


def rewrite_header(path: Location, change: Callable[[dict[str, Any]], None]) -> None:
    content = path.content()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    put(path, len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_offsets", [0, 1 << 60]),
        ("data_offsets", [1 << 59, (1 << 59) + 96]),
        ("data_offsets", [-96, 0]),
        ("data_offsets", [0, 96.0]),
        ("data_offsets", None),
        ("shape", [6, 4]),
        ("dtype", "F64"),
        ("dtype", {}),
    ],
)
def test_headers_that_lie_are_refused(folder: Location, key: str, value: Any) -> None:
    rewrite_header(folder / SHARD, lambda header: header["model/weight"].__setitem__(key, value))
    assert "model/weight" in refused(folder, "off")


def test_tensors_that_share_bytes_are_refused(folder: Location) -> None:
    def share(header: dict[str, Any]) -> None:
        end = header["model/weight"]["data_offsets"][1]
        header["another"] = {"dtype": "U8", "shape": [2], "data_offsets": [end - 1, end + 1]}

    rewrite_header(folder / SHARD, share)
    assert "share bytes" in refused(folder, "off")


def test_a_header_that_names_a_tensor_twice_is_refused(folder: Location) -> None:
    content = (folder / SHARD).content()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].rstrip().replace(b"{", b'{"model/weight": {}, ', 1)
    put(folder / SHARD, len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert "model/weight is there twice" in refused(folder, "off")


def test_a_layout_of_nothing_but_brackets_takes_no_memory() -> None:
    body = b'"tensors": [' + b"[]," * (2 << 20)
    with pytest.raises(CheckpointError, match="lists and objects in"):
        layout_file.parse_layout(layout_file.seal(body))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 99_000_000, 100_000_001])
def test_a_header_of_eight_exabytes_takes_no_memory(folder: Location, length: int) -> None:
    content = (folder / SHARD).content()
    put(folder / SHARD, length.to_bytes(8, "little") + content[8:])
    assert f"it claims a header of {length} bytes" in refused(folder, "off")


def test_a_header_that_is_no_json_is_refused(folder: Location) -> None:
    for text in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        put(folder / SHARD, len(text).to_bytes(8, "little") + text)
        assert "damaged" in refused(folder, "off")


def test_a_file_that_shrinks_after_it_was_verified_is_an_error(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = collective_io.fill_targets

    def shrink_first(*args: Any) -> None:
        cut(folder / SHARD, -1)
        fill(*args)

    monkeypatch.setattr(collective_io, "fill_targets", shrink_first)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_on(0, 1, folder, "one")


def test_only_the_files_of_ones_own_boxes_are_needed(folder: Location) -> None:
    (folder / SHARD).remove()
    target = Shard("model/weight", (8, 6), Box((0, 2), (4, 3)), torch.ones(4, 3))
    collective_io.load(folder, {"model/weight": target}, expect_model=same_model(MODEL), ignore=("",), group=None)
    assert not untouched({"model/weight": target})
