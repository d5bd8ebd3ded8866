"""The rank runner: results, failures, deaths and hangs of real processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RanksFailed, run_ranks


def sum_ranks(rank: int, world_size: int, value: float) -> tuple[int, float, torch.dtype, bool, float]:
    """The process and its sum, and the state that it began with and leaves otherwise."""
    state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(1).item()
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return os.getpid(), total.item(), *state


def test_workers_stay_and_each_call_starts_from_the_same_state() -> None:
    first, second = run_ranks(2, sum_ranks, 1.0), run_ranks(2, sum_ranks, 2.0)
    assert [total for _, total, *_ in first] == [3.0, 3.0]
    assert [total for _, total, *_ in second] == [5.0, 5.0]
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert first[0][2:] == first[1][2:] == second[0][2:] == second[1][2:]


def make_group(rank: int, world_size: int, rendezvous: str) -> tuple[int, str]:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    group = dist.new_group([0, 1])
    return dist.get_world_size(group), os.environ["RANK"]


def test_a_function_can_make_the_group_itself_and_nothing_of_it_is_left() -> None:
    for _ in range(2):
        assert run_ranks(2, make_group, group=False) == [(2, "0"), (2, "1")]


def fail_on(rank: int, world_size: int, failing: tuple[int, ...]) -> None:
    dist.barrier()  # a rank that is still connecting would fail at that
    if rank in failing:
        raise ValueError(f"rank {rank} is broken")
    dist.barrier()


def test_tracebacks_of_all_ranks_are_in_one_error_before_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, fail_on, (0, 2), timeout=50.0)
    assert time.monotonic() - start < 20
    assert sorted(caught.value.failures) == [0, 1, 2]  # rank 1 lost its peers
    assert "ValueError: rank 0 is broken" in str(caught.value)
    assert "ValueError: rank 2 is broken" in str(caught.value)
    assert "in fail_on" in caught.value.failures[2]
    assert run_ranks(3, sum_ranks, 0.0)[0][1] == 3.0  # a fresh pool serves the next call


def hang_on(rank: int, world_size: int, hanging: int) -> None:
    if rank == hanging:
        threading.Event().wait()
    dist.barrier()


def test_a_hang_shows_the_stacks_of_every_rank() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] did not finish in 2 seconds") as caught:
        run_ranks(2, hang_on, 1, timeout=2.0)
    assert "barrier" in caught.value.failures[0]
    assert "in hang_on" in caught.value.failures[1]


def die_on(rank: int, world_size: int, dying: int, number: int) -> None:
    if rank == dying:
        os.kill(os.getpid(), number)
    dist.barrier()


def test_a_death_is_reported_with_rank_signal_and_stack() -> None:
    with pytest.raises(RanksFailed, match="SIGSEGV") as caught:
        run_ranks(2, die_on, 1, int(signal.SIGSEGV))
    assert caught.value.signals == {1: signal.SIGSEGV}
    assert "in die_on" in caught.value.failures[1]
