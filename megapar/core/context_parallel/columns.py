"""Columns of the attention matrix as ranks send them: for each head the key's features, then the value's.

Shape letters: B batch, G key-value heads, S positions, D head size of queries and keys, V of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.device.dtypes import at_least_fp32


class Columns(NamedTuple):
    """Keys and values, or their gradients, as one message. Latents travel in the same form (``latents``).

    Attributes:
        message: [S, B, G, D + V].
        key_dim: D.
    """

    message: Tensor
    key_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Columns:
        """Copy k [B, G, S, D] and v [B, G, S, V] into one message. dtype: that of the message; None for k's."""
        message = torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], dim=-1)
        return cls(message if dtype is None else message.to(dtype), k.shape[-1])

    def with_message(self, message: Tensor) -> Columns:
        """Return columns with the same features at other positions. message: [any, B, G, D + V]."""
        return Columns(message, self.key_dim)

    def zeros(self) -> Columns:
        """Return a zeroed buffer for the gradients of these columns, in max(fp32, dtype)."""
        return self.with_message(self.message.new_zeros(self.message.shape, dtype=at_least_fp32(self.message.dtype)))

    @property
    def k(self) -> Tensor:
        """Keys [B, G, S, D], a view."""
        return self.message.narrow(-1, 0, self.key_dim).permute(1, 2, 0, 3)

    @property
    def v(self) -> Tensor:
        """Values [B, G, S, V], a view."""
        return self.message.narrow(-1, self.key_dim, self.message.shape[-1] - self.key_dim).permute(1, 2, 0, 3)
