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


def add_up(rank: int, world_size: int, value: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return os.getpid(), total


def test_every_rank_returns_its_result_and_the_workers_stay() -> None:
    first = run_ranks(2, add_up, 1.0)
    second = run_ranks(2, add_up, 2.0)
    assert [total.item() for _, total in first] == [3.0, 3.0]
    assert [total.item() for _, total in second] == [5.0, 5.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def make_own_group(rank: int, world_size: int, rendezvous: str) -> tuple[int, str]:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    group = dist.new_group([0, 1])
    return dist.get_world_size(group), os.environ["RANK"]


def test_a_function_can_make_the_group_itself_and_nothing_of_it_is_left() -> None:
    for _ in range(2):
        assert run_ranks(2, make_own_group, group=False) == [(2, "0"), (2, "1")]


def dirty_the_process(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def tell_state(rank: int, world_size: int) -> tuple[torch.dtype, bool, float]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(1).item()


def test_a_call_starts_from_the_same_state_whatever_ran_before() -> None:
    clean = run_ranks(2, tell_state)
    run_ranks(2, dirty_the_process)
    assert run_ranks(2, tell_state) == clean
    assert clean[0] == clean[1]


def fail_on(rank: int, world_size: int, failing: tuple[int, ...]) -> None:
    dist.barrier()  # a rank that is still connecting would fail at that
    if rank in failing:
        raise ValueError(f"rank {rank} is broken")
    dist.barrier()


def test_tracebacks_of_all_ranks_are_in_one_error() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, fail_on, (0, 2))
    assert sorted(caught.value.failures) == [0, 1, 2]  # rank 1 lost its peers
    assert "ValueError: rank 0 is broken" in str(caught.value)
    assert "ValueError: rank 2 is broken" in str(caught.value)
    assert "in fail_on" in caught.value.failures[2]
    assert run_ranks(3, add_up, 0.0)[0][1].item() == 3.0  # a fresh pool serves the next call


def test_one_failing_rank_does_not_make_the_others_wait_for_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 is broken"):
        run_ranks(2, fail_on, (1,), timeout=50.0)
    assert time.monotonic() - start < 20


def hang_on(rank: int, world_size: int, hanging: int) -> None:
    if rank == hanging:
        threading.Event().wait()
    dist.barrier()


def test_a_hang_shows_the_stacks_of_every_rank() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] did not finish in 3 seconds") as caught:
        run_ranks(2, hang_on, 1, timeout=3.0)
    assert "barrier" in caught.value.failures[0]
    assert "in hang_on" in caught.value.failures[1]
    assert run_ranks(2, add_up, 0.0)[0][1].item() == 1.0


def die_on(rank: int, world_size: int, dying: int, number: int) -> None:
    if rank == dying:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_told_with_rank_and_signal(number: signal.Signals) -> None:
    with pytest.raises(RanksFailed, match=number.name) as caught:
        run_ranks(2, die_on, 1, int(number))
    assert caught.value.signals == {1: number}
    if number == signal.SIGSEGV:
        assert "in die_on" in caught.value.failures[1]
