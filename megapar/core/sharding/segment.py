"""A segment: parameters that are gathered and reduced together, in one flat buffer.

flat [n, P]: row r is what rank r of the shard axis masters: the pieces of all parameters of the segment, one after
the other, decayed ones first, and those together that the same axes split.

    parameter a, cut along dim 0     parameter b, cut along dim 1          row 0 | a0 b0 |
        [ a0 ]                            [ b0 | b1 ]                      row 1 | a1 b1 |
        [ a1 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapar.core.axis import Axis
from megapar.core.box import Box
from megapar.core.buffers import BufferPool
from megapar.core.meter import WaitMeter
from megapar.core.sharding.cut import Described, shard_dim
from megapar.core.torch_names import all_gather_single, reduce_scatter_single

# (description, local parameter, this rank's master box, whether this rank counts it in the global norm)
Entry = tuple[Described, nn.Parameter, Box, bool]


@dataclass(frozen=True)
class Member:
    """One parameter of a segment.

    counted: whether this rank counts it in the global norm. parts, dim: sharding cuts it in
    ``parts`` along ``dim``. piece: shape of one
    rank's padded piece. offset: where the piece starts in a row. box: this rank's real piece of the global tensor.
    """

    spec: Described
    parameter: nn.Parameter
    counted: bool
    parts: int
    dim: int
    piece: tuple[int, ...]
    offset: int
    box: Box
    padded: bool

    @property
    def numel(self) -> int:
        """Elements of one padded piece."""
        return prod(self.piece)

    def rows(self, tensor: Tensor) -> Tensor:
        """A whole local tensor as [n, *piece]; a view unless it must be padded."""
        if self.padded:
            tensor = _pad(tensor, self.dim, self.piece[self.dim] * self.parts)
        cut: Tensor = tensor.unflatten(self.dim, (-1, self.piece[self.dim]))
        return cut.movedim(self.dim, 0)


def _pad(tensor: Tensor, dim: int, length: int) -> Tensor:
    padded = tensor.new_zeros(*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


def make_members(parameters: Sequence[Entry], parts: int) -> tuple[Member, ...]:
    """Lay parameters out in a row, in an order that every rank shares; what counts alike on a rank lies together."""
    members: list[Member] = []
    offset = 0
    for spec, parameter, box, counted in sorted(parameters, key=lambda entry: (not entry[0].decay, entry[0].axes)):
        sizes = tuple(parameter.shape)
        dim = shard_dim(sizes, parts)
        piece = (*sizes[:dim], -(-sizes[dim] // parts), *sizes[dim + 1 :])
        padded = piece[dim] * parts != sizes[dim]
        members.append(Member(spec, parameter, counted, parts, dim, piece, offset, box, padded))
        offset += prod(piece)
    return tuple(members)


@dataclass(frozen=True)
class Range:
    """Elements [start, end) of a row that the optimizer treats alike."""

    start: int
    end: int
    decay: bool
    counted: bool


class Segment:
    """Masters, gradients and the collectives of one segment on this rank.

    master [P]: fp32 values of this rank's row. A single rank's fp32 parameters are views of it. units: the layers that
    have parameters in it.
    """

    def __init__(
        self,
        parameters: Sequence[Entry],
        shard: Axis,
        replica: Axis,
        master_dtype: torch.dtype,
        *,
        whole_gradients: bool,
        meter: WaitMeter,
        pool: BufferPool,
    ) -> None:
        self.units = frozenset(spec.unit for spec, *_ in parameters)
        self._meter = meter
        self._pool = pool
        self.shard = shard
        self.replica = replica
        self.members = make_members(parameters, shard.size)
        self.row = self.members[-1].offset + self.members[-1].numel
        first = parameters[0][1]
        self.dtype = first.dtype
        self.master = torch.zeros(self.row, dtype=master_dtype, device=first.device)
        self.gradient: Tensor | None = None
        # Whole main gradients are kept over the micro-batches where the reduction runs once per step (stage 1).
        self.whole_gradients = whole_gradients or shard.size == 1
        self._flat: Tensor | None = None
        self._seen: set[int] = set()
        self._missing = len(self.members)
        self._reduced: Tensor | None = None
        self._work: list[dist.Work] = []
        self._gather: tuple[Tensor, Tensor, dist.Work | None] | None = None
        self.aliased = shard.size == 1 and self.dtype == master_dtype
        if self.aliased:
            for member in self.members:
                member.parameter.data = self.piece(self.master, member)

    @property
    def ranges(self) -> list[Range]:
        """The row cut where decay or counting changes: at most four ranges."""
        found: list[Range] = []
        for (decay, counted), group in groupby(self.members, key=lambda m: (m.spec.decay, m.counted)):
            members = list(group)
            found.append(Range(members[0].offset, members[-1].offset + members[-1].numel, decay, counted))
        return found

    def piece(self, flat: Tensor, member: Member) -> Tensor:
        """A member's real piece as a view of a row-shaped tensor [P]."""
        padded = flat[member.offset : member.offset + member.numel].view(member.piece)
        return padded.narrow(member.dim, 0, member.box.sizes[member.dim])

    def _columns(self, flat: Tensor, member: Member) -> Tensor:
        columns: Tensor = flat[:, member.offset : member.offset + member.numel].unflatten(1, member.piece)
        return columns

    # Gradients: add (each backward) -> launch (once complete) -> settle -> shard's gradient

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        if self.gradient is not None:
            self._pool.give(self.gradient)  # a single rank's is a view of all that is flat
        self.gradient = self._flat = None
        self._seen.clear()

    def begin_micro_batch(self) -> None:
        """Expect one gradient from each member."""
        self._missing = len(self.members)

    def add(self, index: int) -> bool:
        """Member ``index`` has its gradient of this micro-batch; True when it was the segment's last missing one."""
        if self.whole_gradients:
            self._accumulate(index)
        self._missing -= 1
        return self._missing == 0

    def _accumulate(self, index: int) -> None:
        member = self.members[index]
        grad = member.parameter.grad
        if grad is None:
            return
        if self._flat is None:
            self._flat = self._pool.take((self.shard.size, self.row), self.master.dtype)
        target = self._columns(self._flat, member)
        if index in self._seen:
            target.add_(member.rows(grad))
        else:
            target.copy_(member.rows(grad))
            self._seen.add(index)
        member.parameter.grad = None

    def _pack(self) -> Tensor:
        """All members' gradients as [n, P]; a member that got none has gradient zero."""
        flat = self._flat
        if flat is None:
            flat = self._flat = self._pool.take((self.shard.size, self.row), self.master.dtype)
        for index, member in enumerate(self.members):
            if not self.whole_gradients and member.parameter.grad is not None:
                self._columns(flat, member).copy_(member.rows(member.parameter.grad))
                member.parameter.grad = None
            elif index not in self._seen:
                self._columns(flat, member).zero_()
        return flat

    def launch(self, *, overlap: bool) -> None:
        """Start the reduction of what was accumulated since the last launch."""
        flat = self._pack()
        if self.shard.group is None:
            self._reduced = flat[0]
            return
        self._reduced = self._pool.take((self.row,), flat.dtype)
        work = reduce_scatter_single(self._reduced, flat.view(-1), group=self.shard.group, async_op=overlap)
        if work is not None:
            self._work.append(work)

    def settle(self, *, last: bool, overlap: bool) -> None:
        """Wait for the reduce-scatter and add its result; after the step's last one start the sum over replicas."""
        if self._reduced is None:
            return
        self._wait()
        if self.shard.group is not None and self._flat is not None:
            self._pool.give(self._flat)
            self._flat = None
        if self.shard.group is None or self.gradient is None:
            # One rank accumulates in place: what was reduced is the sum over the micro-batches already.
            self.gradient = self._reduced
        else:
            self.gradient.add_(self._reduced)
            self._pool.give(self._reduced)
        self._reduced = None
        if last and self.replica.group is not None:
            work = dist.all_reduce(self.gradient, group=self.replica.group, async_op=overlap)
            if work is not None:
                self._work.append(work)

    def finish(self) -> None:
        """Wait for the sum over replicas."""
        self._wait()

    def _wait(self) -> None:
        for work in self._work:
            self._meter.wait(work)
        self._work.clear()

    # Parameters: publish (after the optimizer) -> receive (before the forward)

    def publish(self, *, overlap: bool) -> None:
        """Send this rank's row to the others in the compute dtype; ``receive`` puts it into the parameters."""
        if self.aliased:
            return
        # A copy also where the dtypes agree: the optimizer may step while the row still travels.
        row = self._pool.take((self.row,), self.dtype).copy_(self.master)
        if self.shard.group is None:
            self._fill(row.unsqueeze(0))
            self._pool.give(row)
            return
        flat = self._pool.take((self.shard.size, self.row), self.dtype)
        work = all_gather_single(flat.view(-1), row, group=self.shard.group, async_op=overlap)
        self._gather = (flat, row, work)
        if work is None:
            self.receive()

    def receive(self) -> None:
        """Wait for a launched gather, if there is one, and fill the parameters."""
        if self._gather is not None:
            flat, row, work = self._gather
            self._gather = None
            if work is not None:
                self._meter.wait(work)
            self._fill(flat)
            self._pool.give(flat)
            self._pool.give(row)

    @torch.no_grad()
    def _fill(self, flat: Tensor) -> None:
        for member in self.members:
            columns = self._columns(flat, member)
            if member.padded:
                whole = columns.movedim(0, member.dim).flatten(member.dim, member.dim + 1)
                member.parameter.copy_(whole.narrow(member.dim, 0, member.parameter.shape[member.dim]))
            else:
                member.rows(member.parameter).copy_(columns)
