"""The late backend: early reads are NaN, waits fix them, and touched buffers are reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import late
from tests.support.ranks import run_ranks

# (output, input, launch) on this rank; inputs are 1 + rank everywhere
Case = tuple[Tensor, Tensor, Callable[..., dist.Work | None]]
APART = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")  # from input to output


def make_cases(rank: int, dtype: torch.dtype) -> dict[str, Case]:
    def tensor(rows: int, value: int) -> Tensor:
        return torch.full((rows, 3), value, dtype=dtype)

    splits = [1, 3] if rank == 0 else [3, 1]  # rank 0 sends 3 rows to rank 1 and keeps 1; rank 1 the reverse
    all_to_all = partial(dist.all_to_all_single, output_split_sizes=splits, input_split_sizes=splits)
    reduced, broadcast = tensor(4, 1 + rank), tensor(4, 1 + rank)
    return {
        "all_to_all_single": (tensor(4, 0), tensor(4, 1 + rank), all_to_all),
        "all_gather_into_tensor": (tensor(8, 0), tensor(4, 1 + rank), dist.all_gather_into_tensor),
        "reduce_scatter_tensor": (tensor(2, 0), tensor(4, 1 + rank), dist.reduce_scatter_tensor),
        "all_reduce": (reduced, reduced, lambda output, _, **options: dist.all_reduce(output, **options)),
        "broadcast": (broadcast, broadcast, lambda output, _, **options: dist.broadcast(output, 0, **options)),
    }


def is_poison(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


def launch_and_wait(rank: int, world_size: int, dtype: torch.dtype) -> None:
    synchronous, asynchronous = make_cases(rank, dtype), make_cases(rank, dtype)
    for name, (expected, sent, launch) in synchronous.items():
        assert launch(expected, sent) is None  # the result is there, the input untouched
        assert not is_poison(expected)
        assert (sent == 1 + rank).all() or sent is expected

        output, sent, launch = asynchronous[name]
        work = launch(output, sent, async_op=True)
        assert work is not None
        in_place = output is sent
        source = name == "broadcast" and rank == 0
        assert is_poison(output) != source, f"{name} read before the wait"
        assert in_place or (sent == 1 + rank).all()
        assert late.in_flight() == [name]
        assert not work.is_completed()
        work.wait()
        work.wait()
        assert torch.equal(output, expected), f"{name} read after the wait"
        assert in_place or is_poison(sent), f"input of {name} after the wait"
        assert late.in_flight() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_early_reads_see_nan_and_the_wait_lands_the_result(dtype: torch.dtype) -> None:
    run_ranks(2, launch_and_wait, dtype, backend="late")


def exchange(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    sent, received = torch.full((3,), 1.0 + rank), torch.zeros(3)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)])
    early = received.clone()
    for work in works:
        work.wait()
    return early, received, sent


def test_point_to_point_lands_at_the_wait_and_keeps_what_was_sent() -> None:
    for rank, (early, received, sent) in enumerate(run_ranks(2, exchange, backend="late")):
        assert is_poison(early), rank
        assert received.tolist() == [2.0 - rank] * 3
        assert sent.tolist() == [1.0 + rank] * 3


def reuse(rank: int, world_size: int) -> list[str]:
    """What is said where an input of a collective, and then of a message, is changed before the wait."""
    tensor = torch.ones(2)
    cases = make_cases(rank, torch.float32)
    works = [(launch(output, sent, async_op=True), sent) for output, sent, launch in (cases[name] for name in APART)]
    works.append((dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0), tensor))
    errors = []
    for work, sent in works:
        assert work is not None
        sent.add_(1)
        try:
            work.wait()
        except late.LateError as error:
            errors.append(str(error))
    assert rank == 0 or tensor.tolist() == [1.0, 1.0]  # what is written to an output in flight is lost
    return errors


def test_an_input_changed_before_the_wait_is_an_error() -> None:
    changed = [f"{name}: an input of shape [4, 3] was changed before the wait" for name in APART]
    sent = "send to 1: an input of shape [2] was changed before the wait"
    assert run_ranks(2, reuse, backend="late") == [[*changed, sent], changed]


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
