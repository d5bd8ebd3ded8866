"""Cache of index tensors on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


class Indices:
    """Index tensors that their owner uses repeatedly. Creating one from a list each time would wait for the device."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Hashable, torch.device], Tensor] = {}

    def of(self, key: Hashable, device: torch.device, order: Callable[[], Sequence[int]]) -> Tensor:
        """Return the index tensor of ``key`` on a device.

        Args:
            key: The owner's name for the order.
            device: Device of the tensor.
            order: Returns the n indices; called the first time only.

        Returns:
            [n] int64.
        """
        if (key, device) not in self._tensors:
            self._tensors[key, device] = torch.tensor(order(), device=device)
        return self._tensors[key, device]
