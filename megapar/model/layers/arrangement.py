"""Order of the positions of a sequence when sequence parallelism is combined with slices of the sequence.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.device.base import Indices
from megapar.moe.slicing import Slicing


class Arrangement:
    """Reorders positions so that the chunk of each mp rank holds its part of every slice.

    Attributes:
        slicing: The slices of the sequence. May change between two forwards.
    """

    def __init__(self, slicing: Slicing, mp: Axis, *, sequence_parallel: bool) -> None:
        self.slicing, self._parts = slicing, mp.size if sequence_parallel else 1
        self._indices = Indices()

    @property
    def moves(self) -> bool:
        """The order differs from the sequence's; otherwise all methods return their input."""
        return self.slicing.degree > 1 and self._parts > 1

    def index(self, length: int, device: torch.device) -> Tensor:
        """Return the source of each position, [length] int64."""
        key = length, self.slicing, "arrange"
        return self._indices.of(key, device, lambda: self.slicing.order(length, self._parts))

    def arrange(self, x_BS: Tensor) -> Tensor:
        """Reorder [B, S, ..]."""
        return x_BS.index_select(1, self.index(x_BS.shape[1], x_BS.device)) if self.moves else x_BS

    def restore(self, x_BS: Tensor) -> Tensor:
        """Undo ``arrange``."""
        if not self.moves:
            return x_BS
        length = x_BS.shape[1]

        def order() -> list[int]:
            chosen = self.slicing.order(length, self._parts)
            return sorted(range(length), key=chosen.__getitem__)

        return x_BS.index_select(1, self._indices.of((length, self.slicing, "restore"), x_BS.device, order))
