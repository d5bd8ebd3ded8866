"""The pool of buffers: what is used again, for what sizes, and who waits for whom."""

from __future__ import annotations

import torch

from megapar.core.comm.buffers import BufferPool

HOST = torch.device("cpu")


class Waits:
    """A stream that notes the events it waits for."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def wait_event(self, event: object) -> None:
        self.events.append(event)


def test_the_smallest_buffer_that_fits_is_used_again() -> None:
    pool = BufferPool.for_messages(HOST)
    small, large = pool.take((2, 4), torch.float32), pool.take((4, 4), torch.float64)
    assert pool.bytes == 32 + 128
    places = small.data_ptr(), large.data_ptr()
    for buffer in (large, small):
        pool.give(buffer.view(-1)[:1])  # any view stands for the whole storage
    again = pool.take((3, 2), torch.float32)
    assert (again.shape, again.dtype, again.data_ptr()) == ((3, 2), torch.float32, places[0])
    assert pool.take((8,), torch.int32).data_ptr() == places[1], "four times the need and no more"
    pool.give(large)
    assert pool.take((31,), torch.uint8).data_ptr() not in places
    assert pool.take((0, 3), torch.float32).shape == (0, 3)


def test_who_writes_waits_for_who_reads() -> None:
    pool, stream = BufferPool(lambda numel, dtype: torch.zeros(numel, dtype=dtype), most=2), Waits()
    buffer = pool.take((4,), torch.float32, stream)
    pool.give(buffer, "read")
    assert pool.take((1,), torch.float32, stream).data_ptr() != buffer.data_ptr()
    assert pool.take((2,), torch.float32, stream).data_ptr() == buffer.data_ptr()
    assert stream.events == ["read"]


def test_nothing_is_kept_where_the_allocator_does_it() -> None:
    pool = BufferPool.for_messages(torch.device("meta"))
    pool.give(pool.take((4,), torch.float32))
    pool.take((4,), torch.float32)
    assert pool.bytes == 32
