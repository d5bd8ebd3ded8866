"""Buffers that are used again instead of freed.

For messages on a CPU: the C library's allocator fragments when communication threads free buffers of changing sizes (a
run grew by 8 MB a step). On an accelerator torch's caching allocator does this work better, and no buffer is kept. For
copies in pinned host memory, which is slow to get, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from megapar.core.device.base import Event, Stream


class BufferPool:
    """Hands out tensors with undefined content and takes them back.

    new: allocates a flat tensor (elements, dtype). keep: keep what is given back for the next ``take``. most: a buffer
    of up to so many times the bytes needed is used again. bytes: allocated so far.
    """

    def __init__(self, new: Callable[[int, torch.dtype], Tensor], *, keep: bool = True, most: int = 4) -> None:
        self.bytes = 0
        self._new = new
        self._keep = keep
        self._most = most
        self._free: list[tuple[Tensor, Event | None]] = []

    @classmethod
    def for_messages(cls, device: torch.device) -> BufferPool:
        """Make a pool of the device's memory, for what collectives read and write."""

        def new(numel: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(numel, dtype=dtype, device=device)

        return cls(new, keep=device.type == "cpu")

    def take(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream | None = None) -> Tensor:
        """Return a tensor: the smallest free buffer that fits, or a new one.

        stream: the one that will write it; it waits until the buffer's last reader has read it.
        """
        numel = prod(shape)
        need = max(numel, 1) * dtype.itemsize
        fitting = [i for i, (raw, _) in enumerate(self._free) if need <= raw.numel() <= self._most * need]
        if not fitting:
            self.bytes += need
            return self._new(max(numel, 1), dtype)[:numel].view(*shape)
        raw, read = self._free.pop(min(fitting, key=lambda i: self._free[i][0].numel()))
        if stream is not None and read is not None:
            stream.wait_event(read)
        return raw[: numel * dtype.itemsize].view(dtype).view(*shape)

    def give(self, tensor: Tensor, read: Event | None = None) -> None:
        """Take back a tensor that, like all that share its storage, is not used any more.

        read: the event after which its content has been read; None: it has been.
        """
        if self._keep:
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._free.append((raw.set_(tensor.untyped_storage()), read))
