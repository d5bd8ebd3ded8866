"""The context parallel algorithm of a model: ring attention, Ulysses (heads) or gathered keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.blockwise import TilePlan, Transport
from megapar.core.context_parallel.gathered import Gathered, gathered_plan
from megapar.core.context_parallel.halo import Halo, halos_of
from megapar.core.context_parallel.positions import RING, ULYSSES, SequenceLayout
from megapar.core.context_parallel.ring import Ring, ring_plan
from megapar.core.context_parallel.share import Share
from megapar.core.context_parallel.slices import GatheredSlices, RingSlices, SlicePlan, SliceTransport, slice_plans
from megapar.core.context_parallel.window_keys import WindowKeys


@dataclass(frozen=True)
class ContextParallel:
    """The ranks of cp that share a sequence, and their algorithm.

    Attributes:
        algorithm: ``RING``, ``ULYSSES`` or ``GATHERED`` (``positions``).
        layout: The positions of each rank.
        comm: Launches the collectives and tracks those in flight.
        latents: Attention that makes keys and values of latents sends the latents (``columns``).
    """

    axis: Axis = field(default_factory=lambda: Axis.single("cp"))
    algorithm: str = RING
    layout: SequenceLayout = field(default_factory=SequenceLayout)
    comm: CommContext = field(default_factory=CommContext)
    latents: bool = False

    @property
    def active(self) -> bool:
        """True if ranks share sequences."""
        return self.axis.size > 1

    @property
    def deals_heads(self) -> bool:
        """True if attention sees whole sequences of some heads (Ulysses)."""
        return self.active and self.algorithm == ULYSSES

    @property
    def transport(self) -> Transport:
        """The transport that moves keys and values to the queries of other ranks."""
        if self.algorithm == RING:
            return Ring(self.axis, self.comm)
        return Gathered(self.axis, self.layout, self.comm)

    @property
    def slice_transport(self) -> SliceTransport:
        """The transport used when attention runs slice by slice."""
        return (RingSlices if self.algorithm == RING else GatheredSlices)(self.axis, self.comm)

    @property
    def window_keys(self) -> WindowKeys:
        """The transport of keys and values to the rows that see them in a window."""
        return WindowKeys(self.axis, self.comm)

    def share(self, mp: Axis, *, sequence_parallel: bool) -> Share:
        """Return the ranks that share the positions of a micro-batch."""
        return Share.of(self.axis, self.layout, mp, sequence_parallel=sequence_parallel)

    def plan(self, mask: AttentionMask) -> TilePlan | None:
        """Return the tiles of a micro-batch, or None if attention sees whole sequences.

        Raises ValueError for documents without a causal mask, which have no tiles.
        """
        if not self.active or self.deals_heads:
            return None
        if mask.ends is not None and not mask.causal:
            raise ValueError("tiles of documents must be causal: pass samples with padding in place of documents")
        if self.algorithm == RING:
            return ring_plan(self.layout, self.axis.rank, mask)
        return gathered_plan(self.layout, self.axis.rank, mask, most=self._most(mask))

    def slice_plans(self, mask: AttentionMask) -> tuple[SlicePlan, ...] | None:
        """Return the tiles of a micro-batch slice by slice, or None if attention sees whole slices.

        Raises ValueError if the mask is not causal.
        """
        if not self.active or self.deals_heads:
            return None
        if not mask.causal:
            raise ValueError("slices attend to earlier slices only: pass a causal mask")
        ring = self.algorithm == RING
        return slice_plans(self.layout, self.axis.rank, mask, ring=ring, most=self._most(mask))

    def halos(self, mask: AttentionMask) -> tuple[Halo, ...]:
        """Return what layers with the window of ``mask`` exchange, once or in each slice of ``layout``.

        Empty without a window, or if attention sees whole sequences or slices.
        """
        if not self.active or self.deals_heads or mask.window is None:
            return ()
        return halos_of(self.layout, self.axis.rank, mask)

    def _most(self, mask: AttentionMask) -> int | None:
        """Return the most columns of a tile that latents are expanded for at a time; None without latents."""
        return mask.length // self.axis.size if self.latents else None
