"""Checkpoints from any layout to any layout, bit for bit, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.shards import HashedFile, Shard, ShardFile, TensorPlan, write_shards
from megapar.checkpoints.save_load import collective_io
from megapar.core.box import Box
from megapar.errors import CheckpointError
from megapar.files.location import Location
from tests.checkpoints.save_load.states import (
    LAYOUT,
    LAYOUTS,
    MODEL,
    SCALARS,
    TENSORS,
    group_of,
    load_on,
    make_state,
    same_model,
    save_on,
    true_tensor,
    world_size,
    wrong,
)
from tests.support.ranks import run_ranks
from tests.support.stores import MemoryStore, in_memory, names, put


def save_from(folder: Path, layout: str) -> None:
    run_on(layout, save_on, folder, layout)


def run_on(layout: str, function, *args):  # type: ignore[no-untyped-def]
    world = world_size(layout)
    return [function(0, 1, *args)] if world == 1 else run_ranks(world, function, *args)


@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_loads_what_every_layout_saved(saved: str, tmp_path: Path) -> None:
    save_from(tmp_path / "c", saved)
    for layout in LAYOUTS:
        for different, scalars in run_on(layout, load_on, tmp_path / "c", layout):
            assert different == [], (saved, layout)
            assert scalars == SCALARS


def read_where_one_rank_cannot(rank: int, world: int, folder: Path, blind: int) -> str:
    group = dist.group.WORLD
    with patch.object(collective_io, "read_layout", wraps=read_layout) as read:
        if rank == blind:
            read.side_effect = CheckpointError("stale")
        try:
            return str(sorted(collective_io.first_read_layout(folder, group).tensors) == sorted(TENSORS))
        except CheckpointError as error:
            return str(error)


@pytest.mark.parametrize(("blind", "told"), [(1, "True"), (0, "stale")])
def test_every_rank_goes_by_what_the_first_one_reads(tmp_path: Path, blind: int, told: str) -> None:
    save_from(tmp_path / "c", "one")
    assert run_ranks(2, read_where_one_rank_cannot, tmp_path / "c", blind) == [told, told]


def test_replicas_are_written_once_and_shared_between_their_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_on, tmp_path / "c", "one")  # both ranks hold everything
    held = [load_file(path) for path in sorted((tmp_path / "c").glob("shard-*.safetensors"))]
    assert len(held) == 2
    assert sorted(name for file in held for name in file) == sorted(set(TENSORS) - {"model/empty"})
    for file in held:  # any safetensors reader opens a shard
        for name, tensor in file.items():
            assert torch.equal(tensor, true_tensor(name))


def save_with_one_primary(rank: int, world: int, folder: Path) -> None:
    shard = Shard.whole("a", torch.full((3,), float(rank)), primary=rank == 1)
    collective_io.save(folder, {"a": shard}, {}, layout=LAYOUT, group=group_of(world))


def test_only_primary_ranks_write(tmp_path: Path) -> None:
    run_ranks(2, save_with_one_primary, tmp_path / "c")
    target = Shard.whole("a", torch.zeros(3))
    collective_io.load(tmp_path / "c", {"a": target}, expect_model=None, group=None)
    assert target.tensor.tolist() == [1.0] * 3
    assert [path.name for path in (tmp_path / "c").glob("shard-*")] == ["shard-00001.safetensors"]


def odd_boxes(rank: int) -> dict[str, Shard]:
    # +-----+  Ranks 0 and 1 share the upper half by columns, ranks 2 and 3 the lower one by rows: no grid.
    # |0 |1 |
    # |  2  |
    # |  3  |
    box = [Box((0, 0), (2, 3)), Box((0, 3), (2, 3)), Box((2, 0), (1, 6)), Box((3, 0), (1, 6))][rank]
    whole = torch.arange(24.0).reshape(4, 6)
    return {"odd": Shard("odd", (4, 6), box, whole[box.slices].clone())}


def save_odd(rank: int, world: int, folder: Path) -> None:
    collective_io.save(folder, odd_boxes(rank), {}, layout=LAYOUT, group=group_of(world))


def test_boxes_need_not_form_a_grid(tmp_path: Path) -> None:
    run_ranks(4, save_odd, tmp_path / "c")
    for box in (Box.whole((4, 6)), Box((1, 2), (2, 2)), Box((3, 5), (1, 1)), Box((1, 0), (0, 6))):
        target = Shard("odd", (4, 6), box, torch.zeros(box.sizes))
        collective_io.load(tmp_path / "c", {"odd": target}, expect_model=None, group=None)
        assert torch.equal(target.tensor, torch.arange(24.0).reshape(4, 6)[box.slices])


def test_strided_tensors_are_saved_and_filled_in_place(store_root: Location) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    collective_io.save(store_root / "c", {"a": Shard.whole("a", whole.t())}, {}, layout=LAYOUT, group=None)
    target = torch.nn.Parameter(torch.zeros(4, 6))
    version = target.data_ptr()
    collective_io.load(store_root / "c", {"a": Shard.whole("a", target.t())}, expect_model=None, group=None)
    assert torch.equal(target, whole)
    assert target.data_ptr() == version


def test_a_tensor_larger_than_a_read_block_arrives_whole(store_root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapar.checkpoints.format.shards.BLOCK_BYTES", 64)
    whole = torch.randn(3, 5, 7)
    collective_io.save(store_root / "c", {"a": Shard.whole("a", whole)}, {}, layout=LAYOUT, group=None)
    for box in (Box.whole((3, 5, 7)), Box((1, 2, 3), (2, 3, 2)), Box((0, 4, 0), (3, 1, 7))):
        target = Shard("a", (3, 5, 7), box, torch.zeros(box.sizes))
        collective_io.load(store_root / "c", {"a": target}, expect_model=None, group=None)
        assert torch.equal(target.tensor, whole[box.slices])


def save_partly(rank: int, world: int, folder: Path, fault: str) -> str:
    state, scalars = make_state("rows", rank, filled=True), dict(SCALARS)
    name, weight = "model/weight", state["model/weight"]
    shards = {
        "shape": Shard.whole("model/scale", torch.zeros(1)),
        "dtype": Shard(name, weight.shape, weight.box, weight.tensor.double()),
        "overlap": Shard(name, weight.shape, Box((3, 0), (5, 6)), torch.zeros(5, 6)),
        "complex": Shard.whole("odd", torch.zeros(1, dtype=torch.complex64)),
    }
    if rank == 1 and fault == "hole":
        del state[name]
    elif rank == 1 and fault in shards:
        state[shards[fault].name] = shards[fault]
    elif rank == 1:
        scalars |= {"scalars": {"iteration": 1}, "not JSON": {"set": {1, 2}}}.get(fault, {})
        state |= {"other": weight} if fault == "misnamed" else {}
    try:
        collective_io.save(folder, state, scalars, layout=LAYOUT, group=group_of(world))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("hole", "model/weight: the shards of all ranks hold 24 of its 48 elements"),
        ("shape", "tensor model/scale is"),
        ("dtype", "tensor model/weight is"),
        ("overlap", "model/weight: "),
        ("scalars", "scalar iteration is 1 on rank 1 and 7"),
        ("not JSON", "scalar set is {1, 2}, which JSON cannot hold"),
        ("complex", "odd has the dtype torch.complex64"),
        ("misnamed", "the shard model/weight is given under the name other"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_on_every_rank(fault: str, told: str, tmp_path: Path) -> None:
    errors = run_ranks(2, save_partly, tmp_path / "c", fault)
    assert all(told in error for error in errors), errors
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_does_not_fit_its_box_is_refused() -> None:
    for shape, box in (((4,), Box((2,), (3,))), ((4,), Box((0,), (2,))), ((4, 1), Box((0,), (3,)))):
        with pytest.raises(CheckpointError, match=r"a local tensor of shape \[3\] was given"):
            Shard("a", shape, box, torch.zeros(3))


def write_to_full_disk(rank: int, world: int, folder: Path) -> str:
    full = patch.object(HashedFile, "write", side_effect=OSError(28, "No space left on device"))
    try:
        with full if rank == 1 else nullcontext():
            save_on(rank, world, folder, "rows")
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_write_error_on_one_rank_is_told_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    save_from(tmp_path / "c", "one")
    errors = run_ranks(2, write_to_full_disk, tmp_path / "c")
    assert len(errors) == 2
    assert all("No space left on device (ranks 1)" in error for error in errors), errors
    assert [path.name for path in tmp_path.iterdir()] == ["c"]  # the older checkpoint of that name is still there
    assert load_on(0, 1, tmp_path / "c", "one") == ([], SCALARS)


def test_a_folder_of_someone_else_is_not_replaced(store_root: Location) -> None:
    put(store_root / "c" / "thesis.tex", b"years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint; it is not replaced"):
        save_on(0, 1, store_root / "c", "one")
    assert names(store_root / "c") == ["thesis.tex"]


def test_a_checkpoint_is_replaced_whole(store_root: Location) -> None:
    save_on(0, 1, store_root / "c", "one")
    put(store_root / "c" / "shard-00001.safetensors", b"of a run with more ranks")
    save_on(0, 1, store_root / "c", "one", salt=1)
    state = make_state("one", 0, filled=False)
    collective_io.load(store_root / "c", state, expect_model=same_model(MODEL), group=None)
    assert wrong(state, salt=1) == []
    assert names(store_root / "c") == ["layout.json", "scalars.json", "shard-00000.safetensors"]
    assert names(store_root) == ["c"]


def test_a_load_reads_the_bytes_that_it_needs() -> None:
    root, whole = in_memory(), torch.randn(1 << 9, 1 << 9)
    collective_io.save(root / "c", {"a": Shard.whole("a", whole)}, {}, layout=LAYOUT, group=None)
    assert isinstance(root.store, MemoryStore)
    root.store.num_read = 0
    target = Shard("a", (1 << 9, 1 << 9), Box((7, 0), (3, 1 << 9)), torch.zeros(3, 1 << 9))
    collective_io.load(root / "c", {"a": target}, expect_model=None, verify="size", group=None)
    assert torch.equal(target.tensor, whole[7:10])
    sizes = (root / "c").list()
    header = (sizes["shard-00000.safetensors"] or 0) - whole.nbytes
    small = (sizes["layout.json"] or 0) + (sizes["scalars.json"] or 0)
    assert root.store.num_read == target.tensor.nbytes + small + 2 * header  # once to check it, once to read


def test_the_layout_tells_grid_model_and_files(tmp_path: Path) -> None:
    save_from(tmp_path / "c", "square")
    layout = read_layout(tmp_path / "c")
    assert layout.grid == LAYOUT["grid"]
    assert layout.model == json.loads(json.dumps(MODEL))
    assert [file.name for file in layout.files] == [f"shard-{rank:05d}.safetensors" for rank in range(4)]
    assert layout.tensors["model/weight"].cut == {"starts": [[[0, 4, 2]], [[0, 3, 2]]], "files": [[0, 1, 4]]}


def load_and_tell(rank: int, world: int, folder: Path, layout: str) -> tuple[str, bool]:
    state = make_state(layout, rank, filled=False)
    try:
        collective_io.load(folder, state, expect_model=same_model(MODEL), group=group_of(world))
    except CheckpointError as error:
        return str(error), all(bool((shard.tensor == 1).all()) for shard in state.values())
    return "", False


def test_one_ranks_damage_stops_all_ranks_before_anything_is_loaded(tmp_path: Path) -> None:
    save_from(tmp_path / "c", "rows")
    (tmp_path / "c" / "shard-00001.safetensors").unlink()
    for error, untouched in run_ranks(2, load_and_tell, tmp_path / "c", "rows"):
        assert "shard-00001.safetensors is missing (ranks 1)" in error
        assert untouched


def load_halves(rank: int, world: int, folder: Path) -> str:
    """Each rank asks for half of the names, as pipeline stages do; rank 0 forgets one of them at the second try."""
    names = sorted(TENSORS)[rank::2]
    state = {name: shard for name, shard in make_state("one", rank, filled=False).items() if name in names}
    collective_io.load(folder, state, expect_model=None, group=group_of(world))
    assert wrong(state) == []
    if rank == 0:
        del state[names[-1]]
    try:
        collective_io.load(folder, state, expect_model=None, group=group_of(world))
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_may_ask_for_different_tensors_but_not_forget_any(tmp_path: Path) -> None:
    save_from(tmp_path / "c", "rows")
    forgotten = sorted(TENSORS)[0::2][-1]
    for error in run_ranks(2, load_halves, tmp_path / "c"):
        assert f"contains tensors that this run does not have: {forgotten}" in error


def load_in_subgroup(rank: int, world: int, folder: Path) -> list[str] | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    state = make_state("rows", rank - 1, filled=True, salt=2)
    collective_io.save(folder, state, SCALARS, layout=LAYOUT, group=group)
    state = make_state("columns", rank - 1, filled=False)
    collective_io.load(folder, state, expect_model=same_model(MODEL), group=group)
    return wrong(state, salt=2)


def test_a_group_that_is_not_the_world_saves_and_loads(tmp_path: Path) -> None:
    assert run_ranks(3, load_in_subgroup, tmp_path / "c") == [None, [], []]


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0,), (3, 0, 2)])
def test_tensors_without_elements(shape: tuple[int, ...], store_root: Location) -> None:
    write_shards(store_root / "s", [TensorPlan("x", torch.float32, shape)], lambda _: torch.empty(shape))
    with ShardFile(store_root / "s") as file:
        out, whole = torch.empty(shape), Box.whole(shape)
        file.read("x", whole, whole, out)
        file.read_as("x", shape, whole, whole, out)
        assert file.describe("x") == ("F32", shape)
