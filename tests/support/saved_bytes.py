"""What a graph keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], object], known: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the storages that the graph of ``run`` saves, except those of known tensors."""
    outside = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, Tensor] = {}  # held, so that no other storage takes an address

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in outside:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
