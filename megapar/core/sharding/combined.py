"""Several ways of sharding beside each other in one model: stage 3, and experts that no rank shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from megapar.core.health.trail import DigestTrail
from megapar.core.sharding.master_shard import MasterShard, ParameterView, Sharding


class CombinedSharding:
    """Keeps each parameter as the member that has it keeps it; parts come one member after the other."""

    def __init__(self, members: Sequence[Sharding]) -> None:
        self._members = members
        self.full = any(member.full for member in members)  # whole experts are the same piece either way
        self.parts: list[MasterShard] = [part for member in members for part in member.parts]

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for member in self._members:
            member.begin_step()

    def begin_micro_batch(self, *, last: bool) -> None:
        """Called before each micro-batch's forward."""
        for member in self._members:
            member.begin_micro_batch(last=last)

    def finish(self) -> None:
        """All gradients are complete when it returns."""
        for member in self._members:
            member.finish()

    def publish(self) -> None:
        """The next forward computes with the new masters."""
        for member in self._members:
            member.publish()

    def wait(self) -> None:
        """Nothing is in flight when it returns."""
        for member in self._members:
            member.wait()

    def views(self, tensors: Sequence[Tensor]) -> Iterator[ParameterView]:
        """Each parameter's piece of tensors that lie beside ``parts`` one for one."""
        start = 0
        for member in self._members:
            end = start + len(member.parts)
            yield from member.views(tensors[start:end])
            start = end

    def watch(self, trail: DigestTrail | None) -> None:
        """Note this rank's gradients, or no longer."""
        for member in self._members:
            member.watch(trail)
