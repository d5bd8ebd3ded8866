"""Master shards: this rank's flat pieces of the master weights, with gradients, for the optimizer to update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.box import Box
from megapar.core.device.remainders import join_master, split_master
from megapar.core.sharding.cut import ParameterInfo


class Treatment(NamedTuple):
    """The facts about a parameter by which an optimizer treats it; shards have parameters of equal ones.

    Attributes:
        decay, router, matrix, decoupled, lr_factor: As in ``ParameterInfo``.
    """

    decay: bool
    router: bool
    matrix: bool
    decoupled: bool
    lr_factor: float

    @classmethod
    def of(cls, spec: ParameterInfo) -> Treatment:
        """Return the treatment of a parameter."""
        return cls(spec.decay, spec.router, spec.matrix, spec.decoupled, spec.lr_factor)


@dataclass
class MasterShard:
    """One tensor of master weights on this rank.

    Attributes:
        master: The values, in max(fp32, compute dtype); of a split master the remainders (``core.device.remainders``).
        grad: Of the same shape, in the main dtype, summed over all data; valid between ``finish`` and the next
            ``begin_step``.
        counted: True if this rank counts it in the global norm; exactly one rank does.
        router: True if it belongs to a router, which may have a different learning rate.
        matrix: True if the optimizer updates its parameters as whole matrices.
        decoupled: True if it belongs to word embeddings or heads with a different learning rate.
        lr_factor: Factor of the learning rate, which leaves the weight decay.
        parts: Lengths of parts that may change their places, which the norm then adds in a way that does not depend on
            them; () if nothing moves.
        weights: Returns the bf16 weights of a split master, which the next gather sends; None if it is not split.
    """

    master: Tensor
    grad: Tensor | None
    decay: bool
    counted: bool
    router: bool = False
    matrix: bool = False
    decoupled: bool = False
    lr_factor: float = 1.0
    parts: tuple[int, ...] = ()
    weights: Callable[[], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.master.dtype if self.weights is None else torch.float32

    @property
    def values(self) -> Tensor:
        """The values: the master itself or, if it is split, a copy of what it is made up of."""
        return self.master if self.weights is None else join_master(self.weights(), self.master)

    def change(self, values: Tensor) -> None:
        """Keep ``values`` that the caller has changed, before ``Sharding.start_param_gather``."""
        if self.weights is not None:
            weights, remainders = split_master(values)
            self.weights().copy_(weights)
            self.master.copy_(remainders)


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
