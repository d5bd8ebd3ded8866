"""The order in which data stands where sequence parallelism meets slices of the sequence.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.device.index import Indices
from megapar.moe.slicing import Slicing


class Arrangement:
    """Puts every mp rank's part of each slice into that rank's chunk; elsewhere nothing moves."""

    def __init__(self, slicing: Slicing, mp: Axis, *, sequence_parallel: bool) -> None:
        self._slicing, self._parts = slicing, mp.size
        self.moves = slicing.degree > 1 and sequence_parallel and mp.size > 1
        self._indices = Indices()

    def index(self, length: int, device: torch.device) -> Tensor:
        """[length] int64: where each position comes from."""
        return self._indices.of((length, "there"), device, lambda: self._slicing.order(length, self._parts))

    def there(self, x_BS: Tensor) -> Tensor:
        """[B, S, ..] of the data in this order."""
        return x_BS.index_select(1, self.index(x_BS.shape[1], x_BS.device)) if self.moves else x_BS

    def back(self, x_BS: Tensor) -> Tensor:
        """``there`` undone."""
        if not self.moves:
            return x_BS
        length = x_BS.shape[1]

        def order() -> list[int]:
            chosen = self._slicing.order(length, self._parts)
            return sorted(range(length), key=chosen.__getitem__)

        return x_BS.index_select(1, self._indices.of((length, "back"), x_BS.device, order))
