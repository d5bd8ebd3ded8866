"""Buffers for what travels, used again instead of allocated anew.

On a CPU the C library's allocator fragments when buffers of changing sizes are freed by communication threads: a run
grew by 8 MB a step. On an accelerator torch's caching allocator does this work better, and nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class BufferPool:
    """Takes and gives uninitialised tensors. keep: hold what is given for the next taker (CPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keep = device.type == "cpu"
        self._free: list[Tensor] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; of what is kept the smallest that is large enough, up to four times the need."""
        need = prod(shape) * dtype.itemsize
        fitting = [i for i, kept in enumerate(self._free) if need <= kept.numel() <= 4 * need]
        if not fitting:
            return torch.empty(*shape, dtype=dtype, device=self._device)
        kept = self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        return kept[:need].view(dtype).view(*shape)

    def give(self, tensor: Tensor) -> None:
        """Nobody uses the tensor, or anything that shares its storage, any more."""
        if self._keep:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._free.append(whole.set_(tensor.untyped_storage()))
