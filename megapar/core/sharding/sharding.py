"""The interface of all sharding stages: who owns parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from megapar.core.sharding.cut import ParameterInfo
from megapar.core.sharding.master_shard import MasterShard, ParameterView
from megapar.health.corruption.trail import DigestTrail


class Sharding(Protocol):
    """Storage of parameters, gradients and optimizer state; the common interface of all stages.

    Attributes:
        master_shards: This rank's master shards.
        full: Masters are cut as by ``master_box(full=True)``.
    """

    master_shards: list[MasterShard]
    full: bool

    def begin_step(self) -> None:
        """Forget the last step's gradients."""

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch; called before each forward. last: it is the step's last one."""

    def finish(self) -> None:
        """Complete the gradient of every master shard; called after the step's last backward."""

    def start_param_gather(self) -> None:
        """Make the next forward compute with the new masters; called after the optimizer changed them."""

    def wait(self) -> None:
        """Wait until nothing is in flight; needed before parameters are read outside a forward, and at the end."""

    def views(self, tensors: Sequence[Tensor]) -> Iterator[ParameterView]:
        """Yield each parameter's piece of ``tensors`` (masters, moments or gradients), one tensor per shard."""

    def cut_rows(self, moves: Callable[[ParameterInfo], bool]) -> None:
        """Cut the master shards into ``parts``: of a parameter that ``moves`` each row of dim 0 is one."""

    def watch(self, trail: DigestTrail | None) -> None:
        """Record each gradient of this rank in ``trail`` before ranks sum it; None: stop."""
