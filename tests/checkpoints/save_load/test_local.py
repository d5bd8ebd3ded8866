"""Local checkpoints: back on the same ranks, or from the neighbour of a lost node; never half, never another run's."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.save_load import local as local_module
from megapar.checkpoints.save_load import local_saves
from megapar.checkpoints.save_load.local import LocalCheckpoints
from tests.support.damage import flip_bit
from tests.support.ranks import run_ranks

FACTS = {"model": {"hidden_size": 8}, "grid": {"mp": 2}}


def state(rank: int, value: float) -> dict[str, Shard]:
    tensors = {"w": torch.full((3, 4), value + rank), "b": torch.full((5,), value, dtype=torch.float64)}
    return {name: Shard.whole(name, tensor) for name, tensor in tensors.items()}


def local_of(rank: int, world: int, root: Path, job: str = "job", facts: dict[str, Any] = FACTS) -> LocalCheckpoints:
    neighbour = None if world == 1 else ((rank + 1) % world, (rank - 1) % world)
    group = None if world == 1 else dist.group.WORLD
    return LocalCheckpoints(root / f"node{rank}", job, rank, world, neighbour, facts, group)


def save_all(local: LocalCheckpoints, rank: int, *iterations: int) -> None:
    for iteration in iterations:
        local.save(iteration, state(rank, float(iteration)), {"iteration": iteration})


def save_and_lose_a_node(rank: int, world: int, root: Path, lost: int) -> tuple[Any, list[float]]:
    local = local_of(rank, world, root)
    save_all(local, rank, 5, 10, 15)
    kept = sorted(path.name for path in (root / f"node{rank}" / "job").glob("iter_*"))
    assert kept == ["iter_0000010", "iter_0000015"]
    dist.barrier()
    if rank == lost:
        shutil.rmtree(root / f"node{rank}")
    dist.barrier()
    local = local_of(rank, world, root)
    found = local.find()
    targets = state(rank, 0.0)
    scalars = local.load(found, targets)
    assert scalars == {"iteration": found.iteration}
    return found, [float(targets["w"].tensor.min()), float(targets["b"].tensor.max())]


@pytest.mark.parametrize("lost", [-1, 1])
def test_a_lost_node_gets_its_state_from_the_node_behind_it(tmp_path: Path, lost: int) -> None:
    results = run_ranks(3, save_and_lose_a_node, tmp_path, lost)
    for rank, (found, values) in enumerate(results):
        assert found.iteration == 15
        assert found.holders == {r: (2 if r == lost == 1 else r) for r in range(3)}
        assert values == [15.0 + rank, 15.0]


def test_what_is_damaged_is_passed_over(tmp_path: Path) -> None:
    local = local_of(0, 1, tmp_path)
    save_all(local, 0, 5, 10)
    newest = tmp_path / "node0" / "job" / "iter_0000010" / "rank-00000.safetensors"
    flip_bit(newest, -1)
    found = local.find()
    assert found.iteration == 5


def fill_the_memory(rank: int, world: int, root: Path) -> tuple[int, list[list[str]]]:
    local = local_of(rank, world, root)
    save_all(local, rank, 5, 10)
    for iteration in (15, 20, 25):
        with contextlib.ExitStack() as stack:
            if rank == 1:
                stack.enter_context(patch.object(local_module, "write_bytes", side_effect=OSError(28, "full")))
            stack.enter_context(pytest.raises(OSError, match="full" if rank == 1 else "another node"))
            local.save(iteration, state(rank, float(iteration)), {})
    found = local.find()
    kept = [
        sorted(path.name for path in node.rglob("*") if path.is_file())
        for node in sorted(root.glob("node*/job/iter_*"))
    ]
    return found.iteration, kept


def test_memory_that_is_full_costs_no_older_checkpoint(tmp_path: Path) -> None:
    for iteration, kept in run_ranks(2, fill_the_memory, tmp_path):
        assert iteration == 10
        files = [f"rank-0000{n}.{suffix}" for n in (0, 1) for suffix in ("json", "safetensors")]
        assert kept == [files] * 4


@pytest.mark.parametrize("header", [b"", b"{", b"[1]", b'{"file": 3}', b"\xff" * 9])
def test_any_header_is_sound_or_passed_over(tmp_path: Path, header: bytes) -> None:
    local = local_of(0, 1, tmp_path)
    local.save(5, state(0, 1.0), {})
    (tmp_path / "node0" / "job" / "iter_0000005" / "rank-00000.json").write_bytes(header)
    assert local.find() is None


def write_in_two_starts(rank: int, world: int, root: Path) -> int | None:
    """Rank 1 writes 10 in the first start, rank 0 only in the second, which its node does not outlive."""
    first = local_of(rank, world, root)
    save_all(first, rank, 5, 10)
    dist.barrier()
    second = local_of(rank, world, root)
    if rank == 0:
        second._write(root / "node0" / "job" / "iter_0000010", 10, state(rank, -10.0), {})
        shutil.rmtree(root / "node1" / "job" / "iter_0000010")
        shutil.rmtree(root / "node0" / "job" / "iter_0000005")
    if rank == 1:
        (root / "node1" / "job" / "iter_0000005" / "rank-00000.json").unlink()
    dist.barrier()
    found = second.find()
    return None if found is None else found.iteration


def test_pieces_of_two_starts_are_not_put_together(tmp_path: Path) -> None:
    assert run_ranks(2, write_in_two_starts, tmp_path) == [None, None]


def test_files_of_ranks_that_are_gone_give_their_memory_back(tmp_path: Path) -> None:
    local_of(0, 1, tmp_path).save(5, state(0, 1.0), {})
    place = tmp_path / "node0" / "job" / "iter_0000005"
    for name in ("rank-00001.json", "rank-00001.safetensors"):
        (place / name).touch()
    local_of(0, 1, tmp_path)
    assert sorted(path.name for path in place.iterdir()) == ["rank-00000.json", "rank-00000.safetensors"]


def refuse_the_folder(rank: int, world: int, root: Path) -> int:
    local = local_of(rank, world, root)
    local.save(5, state(rank, 5.0), {})
    dist.barrier()
    if rank == 1:
        (root / "node1" / "job" / "iter_0000010").touch()  # a file where the folder has to be
    with pytest.raises(OSError, match="iter_0000010" if rank == 1 else "another node"):
        local.save(10, state(rank, 10.0), {})
    found = local.find()
    return found.iteration


def test_a_folder_that_cannot_be_made_leaves_nobody_waiting(tmp_path: Path) -> None:
    assert run_ranks(2, refuse_the_folder, tmp_path) == [5, 5]


def test_another_run_is_not_taken(tmp_path: Path) -> None:
    local_of(0, 1, tmp_path).save(5, state(0, 1.0), {})
    assert local_of(0, 1, tmp_path, job="other").find() is None
    assert local_of(0, 1, tmp_path, facts={**FACTS, "grid": {"mp": 1}}).find() is None
    assert local_of(0, 1, tmp_path).find() is not None


@pytest.mark.parametrize("job", ["..", ".", "../..", "a/../..", "...", "x" * 300, "\udcff", "a b"])
def test_a_job_of_any_name_stays_in_its_folder(tmp_path: Path, job: str) -> None:
    (tmp_path / "precious").touch()
    neighbour = tmp_path / "node0" / "other" / "data.bin"
    neighbour.parent.mkdir(parents=True)
    neighbour.touch()
    tmp_path.chmod(0o755)
    local = local_of(0, 1, tmp_path, job=job)
    assert local.folder.resolve().parent == tmp_path / "node0"
    local.save(5, state(0, 1.0), {})
    assert local.find() is not None
    local.remove()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "node0", neighbour.parent, neighbour, tmp_path / "precious"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_job_keeps_the_folder_of_earlier_versions(tmp_path: Path) -> None:
    assert local_of(0, 1, tmp_path, job="run 7/b").folder.name == "run%207%2Fb"


def test_checkpoints_of_a_later_start_do_not_displace_new_ones(tmp_path: Path) -> None:
    """Nodes are lost, and the rest goes on from a disk, further back and as another grid."""
    local = local_of(0, 1, tmp_path)
    save_all(local, 0, 110, 120)
    local.release()
    local = local_of(0, 1, tmp_path, facts={**FACTS, "grid": {"mp": 1}})
    save_all(local, 0, 60, 70, 80)
    found = local.find()
    assert found is not None
    assert found.iteration == 80
    assert sorted(path.name for path in local.folder.glob("iter_*")) == ["iter_0000070", "iter_0000080"]
    save_all(local, 0, 9_999_990, 10_000_000, 10_000_010)
    found = local.find()
    assert found is not None
    assert found.iteration == 10_000_010
    local.release()


def save_without_a_root(rank: int, world: int, root: Path) -> Any:
    local = local_of(rank, world, root)
    dist.barrier()
    if rank == 1:
        shutil.rmtree(root / "node1")
    dist.barrier()
    with contextlib.suppress(OSError):
        local.save(5, state(rank, 5.0), {"iteration": 5})
    return local.find()


def test_a_folder_that_is_gone_leaves_nobody_waiting(tmp_path: Path) -> None:
    assert run_ranks(2, save_without_a_root, tmp_path, timeout=60) == [None, None]


def save_without_room_for_a_copy(rank: int, world: int, root: Path) -> Any:
    local = local_of(rank, world, root)
    full = patch.object(local_module, "DiskWriting", side_effect=OSError(28, "full"))
    with full if rank == 1 else contextlib.nullcontext(), pytest.raises(OSError, match="no copy of all its parts"):
        local.save(5, state(rank, 5.0), {"iteration": 5})
    found = local.find()
    return found and found.iteration


def test_a_copy_without_room_is_told_and_the_rest_is_kept(tmp_path: Path) -> None:
    assert run_ranks(2, save_without_room_for_a_copy, tmp_path) == [5, 5]


def pair_of_nodes(rank: int, world_size: int, nodes: tuple[int, ...], told: str) -> Any:
    """What a rank of nodes of these sizes makes, from a launcher that may tell their number."""
    own = [size for size in nodes for _ in range(size)][rank]
    world: Any = SimpleNamespace(
        **{"grid": SimpleNamespace(world_size=world_size), "launched": tuple(range(world_size)), "rank": rank},
        **{"on_leave": [], "spare_group": lambda name: dist.group.WORLD, "device": SimpleNamespace(type="cpu")},
    )
    options = SimpleNamespace(local_checkpoint_interval=1, local_checkpoint_dir="memory")
    config: Any = SimpleNamespace(reliability=options)
    job: Any = SimpleNamespace(world=world, sizes=SimpleNamespace(facts=dict))
    environ = {"LOCAL_WORLD_SIZE": str(own), "WORLD_SIZE": str(world_size), "GROUP_WORLD_SIZE": told}
    with (
        patch.dict("os.environ", environ),
        patch.multiple(local_saves.state, grid_facts=lambda job: {}, state_dtypes=lambda job: {}),
        patch.object(local_saves, "LocalCheckpoints") as made,
        patch.object(local_saves, "Background"),
    ):
        _, note = local_saves.make(config, job, "job")
    return made.call_args.args[4], note


@pytest.mark.parametrize("told", ["", "2"])
def test_unequal_nodes_have_no_pairs(told: str) -> None:
    assert run_ranks(2, pair_of_nodes, (1, 1), told) == [((1, 1), ""), ((0, 0), "")]
    note = "WARNING: local checkpoints have no copies, because nodes differ in ranks"
    assert run_ranks(3, pair_of_nodes, (1, 2), told) == [(None, note)] * 3  # untold, the first takes them for equal


def test_pairs_are_in_the_same_place_of_neighbouring_nodes() -> None:
    world: Any = SimpleNamespace(grid=SimpleNamespace(world_size=12), launched=tuple(range(12)), rank=4)
    assert local_saves._neighbour(world, 6) == (10, 10)
    assert local_saves._neighbour(world, 3) == (7, 1)
    assert local_saves._neighbour(world, 12) is None
