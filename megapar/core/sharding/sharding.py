"""The interface of all sharding stages, which own parameters, gradients and optimizer state; several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from megapar.core.sharding.cut import ParameterInfo
from megapar.core.sharding.master_shard import MasterShard, ParameterView
from megapar.health.corruption.step_digest import StepDigest


class Sharding(Protocol):
    """Storage of parameters, gradients and optimizer state; the common interface of all stages.

    Attributes:
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

    def views(self, tensors: Sequence[Tensor | None]) -> Iterator[ParameterView]:
        """Yield each parameter's piece of ``tensors`` (masters, moments or gradients), one per shard or None."""

    def cut_rows(self, moves: Callable[[ParameterInfo], bool]) -> None:
        """Cut the master shards into ``parts``: of a parameter that ``moves`` each row of dim 0 is one."""

    def watch(self, step_digest: StepDigest | None) -> None:
        """Record each gradient of this rank in ``step_digest`` before ranks sum it; None: stop."""


@contextmanager
def changed_masters(sharding: Sharding) -> Iterator[list[Tensor]]:
    """Yield the values of the master shards, and keep what the block changed in them for ``start_param_gather``."""
    values = [shard.values for shard in sharding.master_shards]
    yield values
    for shard, changed in zip(sharding.master_shards, values, strict=True):
        shard.change(changed)


class CombinedSharding:
    """A sharding composed of members, each with separate parameters; ``master_shards`` concatenates theirs.

    For the chunks of a pipeline, and for stage 3 with experts that are whole on one rank.
    """

    def __init__(self, members: Sequence[Sharding]) -> None:
        self._members = members
        self.full = any(member.full for member in members)  # whole experts are the same piece either way
        self.master_shards: list[MasterShard] = [shard for member in members for shard in member.master_shards]

    def begin_step(self) -> None:
        for member in self._members:
            member.begin_step()

    def begin_micro_batch(self, *, last: bool) -> None:
        for member in self._members:
            member.begin_micro_batch(last=last)

    def finish(self) -> None:
        for member in self._members:
            member.finish()

    def start_param_gather(self) -> None:
        for member in self._members:
            member.start_param_gather()

    def wait(self) -> None:
        for member in self._members:
            member.wait()

    def views(self, tensors: Sequence[Tensor | None]) -> Iterator[ParameterView]:
        remaining = iter(tensors)
        for member in self._members:
            yield from member.views([next(remaining) for _ in member.master_shards])

    def cut_rows(self, moves: Callable[[ParameterInfo], bool]) -> None:
        for member in self._members:
            member.cut_rows(moves)

    def watch(self, step_digest: StepDigest | None) -> None:
        for member in self._members:
            member.watch(step_digest)
