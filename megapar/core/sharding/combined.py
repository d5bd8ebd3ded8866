"""Several shardings side by side in one model: stage 3, and experts that are whole on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megapar.core.sharding.cut import ParameterInfo
from megapar.core.sharding.master_shard import MasterShard, ParameterView
from megapar.core.sharding.sharding import Sharding
from megapar.health.corruption.trail import DigestTrail


class CombinedSharding:
    """A sharding composed of members, each with its own parameters; ``master_shards`` concatenates theirs."""

    def __init__(self, members: Sequence[Sharding]) -> None:
        self._members = members
        self.full = any(member.full for member in members)  # whole experts are the same piece either way
        self.master_shards: list[MasterShard] = [shard for member in members for shard in member.master_shards]

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for member in self._members:
            member.begin_step()

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch; called before each forward."""
        for member in self._members:
            member.begin_micro_batch(last=last)

    def finish(self) -> None:
        """Complete all gradients."""
        for member in self._members:
            member.finish()

    def start_param_gather(self) -> None:
        """Make the next forward compute with the new masters."""
        for member in self._members:
            member.start_param_gather()

    def wait(self) -> None:
        """Wait until nothing is in flight."""
        for member in self._members:
            member.wait()

    def views(self, tensors: Sequence[Tensor]) -> Iterator[ParameterView]:
        """Yield each parameter's piece of ``tensors``, which correspond to ``master_shards`` one to one."""
        start = 0
        for member in self._members:
            end = start + len(member.master_shards)
            yield from member.views(tensors[start:end])
            start = end

    def cut_rows(self, moves: Callable[[ParameterInfo], bool]) -> None:
        """Cut the master shards of all members into parts."""
        for member in self._members:
            member.cut_rows(moves)

    def watch(self, trail: DigestTrail | None) -> None:
        """Record this rank's gradients in ``trail``; None: stop."""
        for member in self._members:
            member.watch(trail)
