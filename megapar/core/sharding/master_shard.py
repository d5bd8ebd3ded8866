"""What the optimizer steps: flat local pieces of master parameters with their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megapar.core.box import Box
from megapar.core.health.trail import DigestTrail
from megapar.core.sharding.cut import ParameterInfo


@dataclass
class MasterShard:
    """One tensor of master values on this rank.

    master: fp32 (max(fp32, compute dtype)). grad: of the same shape and dtype, summed over all data, valid between
    ``finish`` and the next ``begin_step``. decay: whether weight decay applies. counted: whether this rank counts it
    in the global norm (exactly one rank does). router: whether it is of a router, whose learning rate may be another.
    """

    master: Tensor
    grad: Tensor | None
    decay: bool
    counted: bool
    router: bool = False


@dataclass(frozen=True)
class ParameterView:
    """A parameter's piece inside parts' tensors: ``box`` of the global tensor, as a view of this rank's storage."""

    spec: ParameterInfo
    box: Box
    tensor: Tensor


class Sharding(Protocol):
    """How parameters, gradients and optimizer state are kept; stages 1 and 2 and stage 3 share this face.

    full: masters are cut as ``master_box`` cuts them with ``full``.
    """

    parts: list[MasterShard]
    full: bool

    def begin_step(self) -> None:
        """Forget the last step's gradients."""

    def begin_micro_batch(self, *, last: bool) -> None:
        """Called before each micro-batch's forward; ``last`` is the step's last one."""

    def finish(self) -> None:
        """Called after the last backward: every part's gradient is complete when it returns."""

    def publish(self) -> None:
        """Called after the optimizer changed masters: the next forward computes with the new values."""

    def wait(self) -> None:
        """Nothing is in flight when it returns; for whoever reads parameters outside a forward, and at the end."""

    def views(self, tensors: Sequence[Tensor]) -> Iterator[ParameterView]:
        """Each parameter's piece of tensors that lie beside ``parts`` one for one: masters, moments, gradients."""

    def watch(self, trail: DigestTrail | None) -> None:
        """Until it is called with None: note each gradient of this rank as it is made, before ranks sum it."""
