"""Padding of keys or values with different head sizes, for kernels that take a single head size.

Zeros appended to the shorter features change neither the scores nor the other features of the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class EqualHeads(NamedTuple):
    """Queries, keys and values of one head size D.

    Attributes:
        q: [B, heads, positions, D].
        k: [B, heads, positions, D].
        v: [B, heads, positions, D].
        scale: Scale of the scores, from the head size before padding; None for the kernel's default, D^-0.5.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None


class HeadWidths(NamedTuple):
    """Features of the heads that the kernel of attention gets: the model's, or more, filled up with zeros.

    Attributes:
        key: Features of a query or key head.
        value: Features of a value head.
    """

    key: int
    value: int


def equal_head_dims(q: Tensor, k: Tensor, v: Tensor) -> EqualHeads:
    """Pad q and k [.., Dk] or v [.., Dv] to max(Dk, Dv) features. Copies nothing if the sizes are equal."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if key_dim == value_dim:
        return EqualHeads(q, k, v, None)
    size = max(key_dim, value_dim)
    return EqualHeads(pad_features(q, size), pad_features(k, size), pad_features(v, size), key_dim**-0.5)


def pad_features(x: Tensor, size: int) -> Tensor:
    """Pad [.., D] to [.., size] with zeros after the features. Returns ``x`` itself if it has that size."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def cut_features(x: Tensor, size: int) -> Tensor:
    """Undo ``pad_features``: return the first ``size`` features of [.., D], or ``x`` itself if it has that size."""
    return x if x.shape[-1] == size else x.narrow(-1, 0, size)
