"""Values of another head size than keys, for kernels that take one head size only.

Zeros appended to the shorter features change neither the scores nor the other features of the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class EqualHeads(NamedTuple):
    """Queries, keys and values of one head size D, all [B, heads, positions, D].

    scale: of the scores, where padding hides the size that it is made from; None: the kernel's own, D^-0.5.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None


def equal_head_dims(q: Tensor, k: Tensor, v: Tensor) -> EqualHeads:
    """Pad q and k [.., Dk] or v [.., Dv] to max(Dk, Dv) features; nothing is copied where the sizes are equal."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if key_dim == value_dim:
        return EqualHeads(q, k, v, None)
    size = max(key_dim, value_dim)
    return EqualHeads(pad_features(q, size), pad_features(k, size), pad_features(v, size), key_dim**-0.5)


def pad_features(x: Tensor, size: int) -> Tensor:
    """[.., D] to [.., size], with zeros after the features; ``x`` itself where it has that size."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def cut_features(x: Tensor, size: int) -> Tensor:
    """Undo ``pad_features``: the first features of [.., D], ``x`` itself where it has no more."""
    return x if x.shape[-1] == size else x.narrow(-1, 0, size)
