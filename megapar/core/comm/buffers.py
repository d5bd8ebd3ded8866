"""Buffers that are reused instead of freed.

Messages on a CPU use them because the C library's allocator fragments when communication threads free buffers of
changing sizes (a run grew by 8 MB a step). On an accelerator torch's caching allocator does this better, so the pool
keeps none of them. Copies in pinned host memory, which is slow to allocate, use them on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from megapar.core.device.base import Event, Stream


class BufferPool:
    """Pool of tensors with undefined content; without ``keep``, returned buffers are freed."""

    def __init__(self, new: Callable[[int, torch.dtype], Tensor], *, keep: bool = True, most: int = 4) -> None:
        """Create an empty pool; ``new`` allocates a flat tensor of (elements, dtype).

        most: Reuse a buffer of at most this many times the bytes needed.
        """
        self.bytes = 0
        self._new = new
        self.keep = keep
        self._most = most
        self._free: list[tuple[int, Tensor, Event | None]] = []  # each with its bytes

    @classmethod
    def for_messages(cls, device: torch.device) -> BufferPool:
        """Create a pool in the device's memory for the inputs and outputs of collectives."""

        def new(numel: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(numel, dtype=dtype, device=device)

        return cls(new, keep=device.type == "cpu")

    def take(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream | None = None) -> Tensor:
        """Return the smallest free buffer that fits, or a new one.

        ``stream`` will write the tensor, and waits until the previous content has been read.
        """
        numel = prod(shape)
        need = max(numel, 1) * dtype.itemsize
        fitting = [(size, i) for i, (size, *_) in enumerate(self._free) if need <= size <= self._most * need]
        if not fitting:
            self.bytes += need
            return self._new(max(numel, 1), dtype)[:numel].view(*shape)
        _, raw, read = self._free.pop(min(fitting)[1])
        if stream is not None and read is not None:
            stream.wait_event(read)
        return raw[: numel * dtype.itemsize].view(dtype).view(*shape)

    def give(self, tensor: Tensor, read: Event | None = None) -> None:
        """Return a tensor to the pool. Neither it nor any tensor that shares its storage may be used after this.

        Args:
            tensor: A tensor from ``take``.
            read: Event after which its content has been read; None if it has been read already.
        """
        if self.keep:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._free.append((raw.numel(), raw, read))
