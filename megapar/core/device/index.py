"""Orders as index tensors on a device, each brought there once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


class Indices:
    """What its owner indexes by again and again; an index made of a list each time would wait for the device."""

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, torch.device], Tensor] = {}

    def of(self, key: Hashable, device: torch.device, order: Callable[[], Sequence[int]]) -> Tensor:
        """[n] int64 on ``device``; ``order`` is asked the first time. key: the owner's name for this order."""
        if (key, device) not in self._made:
            self._made[key, device] = torch.tensor(order(), device=device)
        return self._made[key, device]
