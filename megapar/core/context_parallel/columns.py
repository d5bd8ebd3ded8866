"""Columns of the attention matrix as ranks send them: keys and values, or the latents of which they are made.

    keys and values [S, B, G, D + V]   for each head the key's features, then the value's
    latents [S, B, 1, R + Dr]          the latent in the place of the key, the rotary key in the place of the value
      latent [.., R] @ weight [N (Dn + V), R]^T  ->  the plain part of keys [.., N, Dn], values [.., N, V]
      rotary key [.., Dr]                        ->  the rest of keys, the same for all heads
    backward: dk, dv of the heads here -> the gradient of the message, and of the weight by one product per expansion

A position costs R + Dr features in a message of latents instead of N (D + V). The price is that each rank expands the
columns of all ranks, in the forward and again in the backward. They are expanded piece by piece, in at most as many
positions as this rank holds, so that never more than N (D + V) S features of keys and values exist at a time, and as
many of their gradients in max(fp32, dtype). With DeepSeek-V3's 128 heads, 4096 positions and bf16 that is 0.3 GiB, and
0.6 GiB in the backward. Columns outside the tiles are not expanded. Neither keys nor values are kept for the backward.

Source: multi-latent attention, DeepSeek-V2, arXiv 2405.04434, section 2.1. Shape letters: B batch, N query heads of
this rank, G key-value heads, S positions of this rank, D head size of queries and keys, V of values, R features of a
latent, Dn plain and Dr rotary features of a key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.context_parallel.online_softmax import OnlineSoftmax, OnlineSoftmaxBackward
from megapar.core.context_parallel.tiles import Tile, spans
from megapar.core.device.dtypes import WeightProduct, at_least_fp32
from megapar.core.device.ops import op
from megapar.core.sharding.gradient_sink import GradientSink


class Columns(NamedTuple):
    """Keys and values, or their gradients, as one message [S, B, G, D + V]; or latents. ``key_dim`` is D."""

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


@dataclass(frozen=True)
class Expansion:
    """The weight that makes keys and values of latents.

    Attributes:
        weight: [N, Dn + V, R]: for each head the plain features of the key, then those of the value.
        defer_wgrad: Called in the backward with each product of the weight's gradient, which it returns, defers, or
            adds to a bucket; None to leave it to autograd.
    """

    weight: Tensor
    defer_wgrad: GradientSink | None = None


class ColumnReader:
    """Reader of columns that have arrived: keys and values themselves."""

    def value_dim(self, q: Tensor, v: Tensor) -> int:
        """Return V for q [B, N, S, D] and the second part of the columns, [B, G, S, features]."""
        return v.shape[-1]

    def attend(self, rows: OnlineSoftmax, tiles: Iterable[Tile], columns: Columns) -> None:
        """Attend to tiles of the columns."""
        rows.attend(tiles, columns.k, columns.v)

    def differentiate(
        self, rows: OnlineSoftmaxBackward, tiles: Iterable[Tile], columns: Columns, gradients: Columns
    ) -> None:
        """Add the tiles' share to the gradients of the rows and of the columns."""
        rows.differentiate(tiles, columns.k, columns.v, gradients.k, gradients.v)

    def weight_gradient(self) -> Tensor | None:
        """Return the gradient of the weight over all calls of ``differentiate``, if it is left to autograd."""
        return None


class LatentReader(ColumnReader):
    """Reader of columns that are latents, during one forward or one backward.

    most: the maximum number of columns that are expanded at a time, except for a single larger tile.
    """

    def __init__(
        self, weight: Tensor, defer_wgrad: GradientSink | None, rotary_dim: int, most: int, *, needs_wgrad: bool = False
    ) -> None:
        self._weight, self._defer_wgrad, self._rotary_dim, self._most = weight, defer_wgrad, rotary_dim, most
        self._rows = weight.flatten(0, 1)
        self._needs_wgrad = needs_wgrad
        self._total: Tensor | None = None

    def value_dim(self, q: Tensor, v: Tensor) -> int:
        """See ``ColumnReader.value_dim``."""
        return self._weight.shape[1] - q.shape[-1] + v.shape[-1]

    def attend(self, rows: OnlineSoftmax, tiles: Iterable[Tile], columns: Columns) -> None:
        """Expand the columns of the tiles piece by piece and attend to them."""
        for span, group in spans(tiles, self._most):
            rows.attend(group, *self.expand(_cut(columns, span), rows.key_dim))

    def differentiate(
        self, rows: OnlineSoftmaxBackward, tiles: Iterable[Tile], columns: Columns, gradients: Columns
    ) -> None:
        """Expand the columns again; add to their gradients and to the weight's."""
        for span, group in spans(tiles, self._most):
            piece = _cut(columns, span)
            k, v = self.expand(piece, rows.key_dim)
            dk, dv = (torch.zeros(x.shape, dtype=at_least_fp32(x.dtype), device=x.device) for x in (k, v))
            rows.differentiate(group, k, v, dk, dv)
            del k, v
            self._add_gradients(dk, dv, piece, _cut(gradients, span))

    def expand(self, columns: Columns, key_dim: int) -> tuple[Tensor, Tensor]:
        """Return keys [B, N, L, D] and values [B, N, L, V] of latent columns [L, B, 1, R + Dr]. key_dim: D."""
        (length, samples), (heads, features, _) = columns.message.shape[:2], self._weight.shape
        up = (_rows_of(columns) @ self._rows.t()).view(length, samples, heads, features)
        plain, v = up.split([key_dim - self._rotary_dim, features - key_dim + self._rotary_dim], dim=-1)
        rotary = columns.message.narrow(-1, columns.key_dim, self._rotary_dim).expand(-1, -1, heads, -1)
        return torch.cat([plain, rotary], dim=-1).permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)

    def weight_gradient(self) -> Tensor | None:
        """Return the sum of the products that were not deferred, rounded once to the dtype of the weight."""
        return None if self._total is None else self._total.to(self._weight.dtype).view(self._weight.shape)

    def _add_gradients(self, dk: Tensor, dv: Tensor, columns: Columns, gradients: Columns) -> None:
        """Add what dk [B, N, L, D] and dv [B, N, L, V] say of the columns' gradients and of the weight's."""
        (length, samples), plain_dim = columns.message.shape[:2], dk.shape[-1] - self._rotary_dim
        up = self._weight.new_empty((length, samples, *self._weight.shape[:2]))
        for part, grad in zip(up.tensor_split([plain_dim], dim=-1), (dk[..., :plain_dim], dv), strict=True):
            part.copy_(grad.permute(2, 0, 1, 3))
        dy = up.view(length * samples, -1)
        latent = torch.empty((dy.shape[0], columns.key_dim), dtype=gradients.message.dtype, device=dy.device)
        op("add_product", dy)(latent, dy, self._rows, begins=True)
        gradients.k.add_(latent.view(length, samples, -1).transpose(0, 1).unsqueeze(1))
        gradients.v.add_(dk[..., plain_dim:].sum(1, keepdim=True))
        if self._needs_wgrad:
            self._add_to_weight(WeightProduct(dy.t(), _rows_of(columns)))

    def _add_to_weight(self, product: WeightProduct) -> None:
        """Defer the product, or add it in max(fp32, dtype)."""
        begins = self._total is None
        if begins and self._defer_wgrad is None:
            self._total = torch.empty(self._rows.shape, dtype=at_least_fp32(self._rows.dtype), device=self._rows.device)
        if self._defer_wgrad is None:
            op("add_product", product.left)(self._total, product.left, product.right, begins=begins)
            return
        grad = self._defer_wgrad(product)
        if grad is not None:
            self._total = grad.to(at_least_fp32(grad.dtype)) if self._total is None else self._total.add_(grad)


def reader_of(
    weight: Tensor | None, defer_wgrad: GradientSink | None, rotary_dim: int, most: int, *, needs_wgrad: bool
) -> ColumnReader:
    """Return the reader of latents that ``weight`` expands, or that of keys and values if it is None."""
    if weight is None:
        return ColumnReader()
    return LatentReader(weight, defer_wgrad, rotary_dim, most, needs_wgrad=needs_wgrad)


def _cut(columns: Columns, span: range) -> Columns:
    return columns.with_message(columns.message[span.start : span.stop])


def _rows_of(columns: Columns) -> Tensor:
    """Return the latents [L B, R] of columns, a view."""
    return columns.message.narrow(-1, 0, columns.key_dim).flatten(0, 2)
