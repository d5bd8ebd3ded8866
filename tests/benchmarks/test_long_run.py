"""What a long run compares: memory in use, memory held, and bits of killed runs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch

from benchmarks.long_run.counted import live_bytes, python_blocks
from benchmarks.long_run.run import LIMITS, Held, Run, growth

STEPS = 600


def run(
    *, blocks_a_step: float = 0, live_a_step: float = 0, held: float = 0, outside: float = 0, start: int = 0
) -> Run:
    """A run whose last start is after a step, and which grows by so much."""
    steps = range(1, STEPS + 1)
    return Run(
        status=0,
        records={i: {"iteration_seconds": 0.3} for i in steps},
        held=[Held(i, 0, int(i > start), int(8e8 * (1 + held * (i > STEPS / 2))), 9, 5) for i in steps],
        work=[(i, 0.02) for i in steps],
        counted={
            i: {
                "python_blocks": 900_000 + blocks_a_step * i,
                "live_bytes": 4e8 + live_a_step * i,
                "bytes_outside_heap": 2e8 * (1 + outside * i / STEPS),
            }
            for i in range(39, STEPS, 40)
        },
    )


def too_large(done: Run) -> list[str]:
    return [name for name, value in growth(done, STEPS).items() if name in LIMITS and value > LIMITS[name]]


def test_a_run_that_keeps_a_record_of_each_step_is_found_and_a_flat_one_is_not() -> None:
    assert too_large(run()) == too_large(run(start=280)) == []
    assert too_large(run(blocks_a_step=3)) == too_large(run(blocks_a_step=3, start=280)) == ["python_blocks_per_step"]


def test_kept_tensors_are_found_and_what_the_allocator_takes_in_the_first_half_is_not() -> None:
    assert too_large(run(live_a_step=16 << 10)) == ["live_bytes"]
    assert too_large(run(held=0.5)) == []
    assert too_large(run(outside=0.2)) == ["bytes_outside_heap"]


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Garbage of other tests is collected before, and none in between."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library, or glibc before 2.33")
@pytest.mark.usefixtures("no_collection")
def test_memory_in_use_is_what_was_not_freed() -> None:
    size = 32 << 20
    before, blocks = live_bytes(), python_blocks()
    tensor, records = torch.zeros(size, dtype=torch.uint8), [(str(i),) for i in range(10_000)]
    assert size <= live_bytes() - before < size + (4 << 20)
    assert python_blocks() - blocks >= 2 * len(records)
    del tensor, records
    assert live_bytes() - before < 4 << 20
    assert python_blocks() - blocks < 1000
