"""Pinned (page-locked) host memory of exactly the requested size.

torch's allocator of pinned memory rounds up to the next power of two, so the master weights and moments of a model may
take nearly twice their size in host memory. This module maps large buffers that live as long as the run, and registers
them with the driver. Unlike torch's allocator, it does not hold memory back while a copy runs: the owner must keep the
buffer until its last copy has been waited for.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

# Below this size rounding costs little, but a mapping of whole pages would cost more.
LEAST_BYTES = 1 << 20


def pinned_exactly(numel: int, dtype: torch.dtype) -> Tensor:
    """Return [numel] zeros that a CUDA device can read and write by itself, freed with their storage.

    Raises RuntimeError if the driver refuses to register the memory (``ulimit -l``, the limit of a container).
    """
    pages = _Pages(-1, numel * dtype.itemsize)  # zeros on pages that nothing else uses
    zeros = torch.frombuffer(pages, dtype=dtype)
    pages.register(zeros.data_ptr())
    return zeros


class _Pages(mmap.mmap):
    """A mapping that is unregistered from the driver before it is unmapped; a weak reference would be too late."""

    address = 0

    def register(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        self.address = address

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)
