"""The method by which the layers of a model attend across the ranks of cp: ring, heads or gathered keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.blockwise import TilePlan, Transport
from megapar.core.context_parallel.gathered import Gathered, gathered_plan
from megapar.core.context_parallel.positions import RING, ULYSSES, SequenceLayout
from megapar.core.context_parallel.ring import Ring, ring_plan
from megapar.core.context_parallel.share import Share
from megapar.core.context_parallel.slices import GatheredSlices, RingSlices, SlicePlan, SliceTransport, slice_plans
from megapar.core.context_parallel.tiles import Sight


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sequence, and their algorithm.

    axis: cp. algorithm: ring, ulysses or gathered (``layout``). layout: which rank holds which positions. comm:
    takes part in what is launched.
    """

    axis: Axis = field(default_factory=lambda: Axis.single("cp"))
    algorithm: str = RING
    layout: SequenceLayout = field(default_factory=SequenceLayout)
    comm: CommContext = field(default_factory=CommContext)

    @property
    def active(self) -> bool:
        """True where ranks share sequences."""
        return self.axis.size > 1

    @property
    def deals_heads(self) -> bool:
        """True where attention sees whole sequences, of some heads."""
        return self.active and self.algorithm == ULYSSES

    @property
    def transport(self) -> Transport:
        """The transport of keys and values to the queries of other ranks."""
        if self.algorithm == RING:
            return Ring(self.axis, self.comm)
        return Gathered(self.axis, self.layout, self.comm)

    @property
    def slice_transport(self) -> SliceTransport:
        """The same where attention runs slice by slice."""
        return (RingSlices if self.algorithm == RING else GatheredSlices)(self.axis, self.comm)

    def share(self, mp: Axis, *, sequence_parallel: bool) -> Share:
        """The ranks that have positions of one micro-batch."""
        return Share.of(self.axis, self.layout, mp, sequence_parallel=sequence_parallel)

    def plan(
        self,
        samples: int,
        own_length: int,
        *,
        causal: bool,
        ends: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> TilePlan | None:
        """The tiles of a micro-batch; None where attention sees whole sequences.

        own_length: positions of this rank. ends, lengths: documents or padding of the whole, see ``Sight``.
        """
        if not self.active or self.deals_heads:
            return None
        sight = Sight.of(samples, own_length * self.axis.size, causal=causal, ends=ends, lengths=lengths)
        make = ring_plan if self.algorithm == RING else gathered_plan
        return make(self.layout, self.axis.rank, sight)

    def slice_plans(
        self, samples: int, own_length: int, *, ends: Sequence[int] | None = None
    ) -> tuple[SlicePlan, ...] | None:
        """The tiles of a micro-batch slice by slice, causal; None where attention sees whole slices."""
        if not self.active or self.deals_heads:
            return None
        sight = Sight.of(samples, own_length * self.axis.size, causal=True, ends=ends)
        return slice_plans(self.layout, self.axis.rank, sight, ring=self.algorithm == RING)
