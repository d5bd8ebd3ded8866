"""Master shards: this rank's flat pieces of the master weights, with gradients, for the optimizer to update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapar.core.box import Box
from megapar.core.sharding.cut import ParameterInfo


@dataclass
class MasterShard:
    """One tensor of master weights on this rank.

    Attributes:
        master: The values, in max(fp32, compute dtype).
        grad: Of the same shape and dtype, summed over all data; valid between ``finish`` and the next ``begin_step``.
        counted: True if this rank counts it in the global norm; exactly one rank does.
        router: True if it belongs to a router, which may have a different learning rate.
        matrix: True if the optimizer updates its parameters as whole matrices.
        parts: Lengths of parts that may change their places, which the norm then adds in a way that does not depend on
            them; () if nothing moves.
    """

    master: Tensor
    grad: Tensor | None
    decay: bool
    counted: bool
    router: bool = False
    matrix: bool = False
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class ParameterView:
    """A parameter's piece within the tensors of master shards.

    Attributes:
        box: The piece, in coordinates of the global tensor.
        tensor: The values, a view of this rank's storage.
    """

    spec: ParameterInfo
    box: Box
    tensor: Tensor
