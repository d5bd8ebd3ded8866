"""The late backend: early reads are NaN, waits fix them, and touched buffers are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import late
from tests.support.ranks import RanksFailed, run_ranks

# name -> (output, input, launch) on this rank; inputs are 1 + rank everywhere, except where said
Case = tuple[Tensor, Tensor, Callable[[Tensor, Tensor, bool], dist.Work | None]]


def make_case(name: str, rank: int, dtype: torch.dtype) -> Case:
    mine = torch.full((4, 3), 1 + rank, dtype=dtype)
    if name == "all_to_all_single":
        return torch.zeros_like(mine), mine, lambda o, i, a: dist.all_to_all_single(o, i, async_op=a)
    if name == "all_to_all_single uneven":  # rank 0 sends 3 rows to rank 1 and keeps 1; rank 1 the reverse
        splits = [1, 3] if rank == 0 else [3, 1]
        return (
            torch.zeros_like(mine),
            mine,
            lambda o, i, a: dist.all_to_all_single(o, i, splits, splits, async_op=a),
        )
    if name == "all_gather_into_tensor":
        return torch.zeros(8, 3, dtype=dtype), mine, lambda o, i, a: dist.all_gather_into_tensor(o, i, async_op=a)
    if name == "reduce_scatter_tensor":
        return torch.zeros(2, 3, dtype=dtype), mine, lambda o, i, a: dist.reduce_scatter_tensor(o, i, async_op=a)
    if name == "all_reduce":
        return mine, mine, lambda o, i, a: dist.all_reduce(o, async_op=a)
    if name == "broadcast":
        return mine, mine, lambda o, i, a: dist.broadcast(o, 0, async_op=a)
    raise ValueError(name)


CASES = [
    "all_to_all_single",
    "all_to_all_single uneven",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
]


def is_poison(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


def launch_and_wait(rank: int, world_size: int, name: str, dtype: torch.dtype) -> None:
    expected, sent, launch = make_case(name, rank, dtype)
    assert launch(expected, sent, False) is None  # synchronous: the result is there, the input untouched
    assert not is_poison(expected)
    assert (sent == 1 + rank).all() or sent is expected

    output, sent, launch = make_case(name, rank, dtype)
    work = launch(output, sent, True)
    assert work is not None
    in_place = output is sent
    source = name == "broadcast" and rank == 0
    assert is_poison(output) != source, "read before the wait"
    assert in_place or (sent == 1 + rank).all()
    assert [name.split()[0]] == late.in_flight()
    assert not work.is_completed()
    work.wait()
    work.wait()
    assert torch.equal(output, expected), "read after the wait"
    assert in_place or is_poison(sent), "input after the wait"
    assert late.in_flight() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_early_reads_see_nan_and_the_wait_lands_the_result(name: str, dtype: torch.dtype) -> None:
    run_ranks(2, launch_and_wait, name, dtype, backend="late")


def exchange(rank: int, world_size: int, wait: bool) -> tuple[Tensor, Tensor]:
    sent, received = torch.full((3,), 1.0 + rank), torch.zeros(3)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)])
    early = received.clone()
    for work in works:
        work.wait()
    return (received if wait else early), sent


def test_point_to_point_lands_at_the_wait_and_keeps_what_was_sent() -> None:
    for rank, (early, _) in enumerate(run_ranks(2, exchange, False, backend="late")):
        assert is_poison(early), rank
    for rank, (received, sent) in enumerate(run_ranks(2, exchange, True, backend="late")):
        assert received.tolist() == [2.0 - rank] * 3
        assert sent.tolist() == [1.0 + rank] * 3


def reuse_input(rank: int, world_size: int, name: str) -> None:
    output, sent, launch = make_case(name, rank, torch.float32)
    work = launch(output, sent, True)
    assert work is not None
    sent.add_(1)
    work.wait()


@pytest.mark.parametrize("name", CASES[:4])
def test_an_input_changed_before_the_wait_is_an_error(name: str) -> None:
    with pytest.raises(RanksFailed, match=f"{name.split()[0]}: an input of shape .4, 3. was changed before the wait"):
        run_ranks(2, reuse_input, name, backend="late")


def reuse_sent(rank: int, world_size: int) -> None:
    tensor = torch.ones(2)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    assert work is not None
    tensor.zero_()
    work.wait()
    assert tensor.tolist() == [1.0, 1.0]  # what is written to an output in flight is lost


def test_a_sent_tensor_changed_before_the_wait_is_an_error() -> None:
    with pytest.raises(RanksFailed, match=r"send to 1: an input of shape \[2\] was changed") as caught:
        run_ranks(2, reuse_sent, backend="late")
    assert next(iter(caught.value.failures)) == 0


def wait_out_of_order(rank: int, world_size: int) -> list[float]:
    tensors = [torch.tensor([float(10 * i + rank)]) for i in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in (2, 0, 1) if rank == 0 else (1, 2, 0):
        works[index].wait()
    return [tensor.item() for tensor in tensors]


def test_ranks_may_wait_in_different_orders() -> None:
    assert run_ranks(2, wait_out_of_order, backend="late") == [[1.0, 21.0, 41.0]] * 2


def work_in_subgroups(rank: int, world_size: int, rendezvous: str) -> tuple[float, float]:
    late.register()
    dist.init_process_group("late", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    results = []
    for group in (pairs[rank // 2], mesh.get_group("outer")):
        tensor = torch.tensor([float(rank)])
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert is_poison(tensor)
        work.wait()
        results.append(tensor.item())
    return results[0], results[1]


def test_groups_and_meshes_made_from_it_are_late() -> None:
    assert run_ranks(4, work_in_subgroups, group=False) == [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]
