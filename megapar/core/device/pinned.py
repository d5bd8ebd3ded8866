"""Page-locked host memory of exactly the size that is asked for.

torch's own allocator of such memory rounds up to the next power of two, so that the masters and moments of a model may
take nearly twice their size of the host's memory. Large buffers that live as long as the run are mapped and registered
with the driver here. That allocator also keeps memory back while a copy runs; whoever takes a buffer from here must
keep it until its last copy has been waited for.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

# Below it a rounded size costs little, and a mapping of whole pages would.
LEAST_BYTES = 1 << 20


def pinned_exactly(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] zeros that a CUDA device copies from and to by itself; freed when its storage is.

    Raises RuntimeError where the driver refuses to register the memory (``ulimit -l``, a container's limit).
    """
    pages = _Pages(-1, numel * dtype.itemsize)  # zeros, and nothing else on their pages
    zeros = torch.frombuffer(pages, dtype=dtype)
    pages.register(zeros.data_ptr())
    return zeros


class _Pages(mmap.mmap):
    """A mapping that the driver lets go of before it ends; a weak reference would be told behind its end."""

    address = 0

    def register(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        self.address = address

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)
