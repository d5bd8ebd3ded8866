"""Page-locked memory of exact size, with a stand-in for the driver that no machine without a GPU has."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from megapar.core.device import pinned

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells mappings by Linux's own list")


def mapped(address: int, size: int) -> list[str]:
    """The lines of this process's map that hold the whole range."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [(line, *(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
    return [line for line, start, end in ranges if start <= address and address + size <= end]


class Driver:
    """Knows which memory is registered, as cudaHostRegister and cudaHostUnregister do."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        assert address % mmap.PAGESIZE == 0
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        size = self.registered.pop(address)
        assert mapped(address, size), "the memory was given back before the driver let go of it"
        return 0


@pytest.fixture
def driver(monkeypatch):
    found, errors = Driver(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "check_error", errors.append)
    yield found
    assert set(errors) == {0}


def test_a_buffer_takes_what_it_needs_and_is_given_back(driver):
    numel = (3 << 20) // 4 + 5  # torch's allocator would take 4 MiB
    buffer = pinned.pinned_exactly(numel, torch.float32)
    assert driver.registered == {buffer.data_ptr(): 4 * numel}
    assert buffer.shape == (numel,)
    assert not buffer.any()
    part = buffer[1:].view(2, -1)
    buffer.fill_(2.0)
    del buffer
    gc.collect()
    assert driver.registered  # a view holds it
    assert part.sum() == 2.0 * (numel - 1)
    del part
    gc.collect()
    assert driver.registered == {}


def test_memory_that_the_driver_refuses_is_an_error(driver, monkeypatch):
    def refuse(_: int) -> None:
        raise RuntimeError("cudaErrorMemoryAllocation")

    driver.cudaHostRegister(mmap.PAGESIZE, 1, 0)
    torch.cuda.check_error(0)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        pinned.pinned_exactly(1 << 20, torch.uint8)
