"""Master shards: this rank's flat pieces of the master weights, with gradients, for the optimizer to update.

Tested in ``tests/core/optimizer/test_adamw.py``.
"""

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
    """One tensor of master weights on this rank.

    Attributes:
        master: the values, in max(fp32, compute dtype).
        grad: of the same shape and dtype, summed over all data; valid between ``finish`` and the next ``begin_step``.
        decay: True if weight decay applies.
        counted: True if this rank counts it in the global norm; exactly one rank does.
        router: True if it belongs to a router, which may have a different learning rate.
    """

    master: Tensor
    grad: Tensor | None
    decay: bool
    counted: bool
    router: bool = False


@dataclass(frozen=True)
class ParameterView:
    """A parameter's piece within the tensors of master shards.

    Attributes:
        spec: its row of the parameter table.
        box: the piece, in coordinates of the global tensor.
        tensor: the values, a view of this rank's storage.
    """

    spec: ParameterInfo
    box: Box
    tensor: Tensor


class Sharding(Protocol):
    """Storage of parameters, gradients and optimizer state; the common interface of all stages.

    Attributes:
        parts: this rank's master shards.
        full: masters are cut as by ``master_box(full=True)``.
    """

    parts: list[MasterShard]
    full: bool

    def begin_step(self) -> None:
        """Forget the last step's gradients."""

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch; called before each forward. last: it is the step's last one."""

    def finish(self) -> None:
        """Complete every part's gradient; called after the step's last backward."""

    def start_param_gather(self) -> None:
        """Make the next forward compute with the new masters; called after the optimizer changed them."""

    def wait(self) -> None:
        """Wait until nothing is in flight; needed before parameters are read outside a forward, and at the end."""

    def views(self, tensors: Sequence[Tensor]) -> Iterator[ParameterView]:
        """Yield each parameter's piece of ``tensors`` (masters, moments or gradients), one tensor per part."""

    def watch(self, trail: DigestTrail | None) -> None:
        """Record each gradient of this rank in ``trail`` before ranks sum it; None: stop."""
