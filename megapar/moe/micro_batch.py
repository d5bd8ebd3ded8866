"""Routing of one micro-batch as a whole: the kept pairs, the number of rows, and the statistics.

A micro-batch may be divided twice: among ranks, and on each rank into slices of the sequence. The pairs that an expert
keeps depend on neither, so a slice needs the counts of the tokens before it, on all ranks:

    one slice      the counts are gathered with the router's sums, in one all-gather for both
    many slices    the counts of each slice are gathered when it is routed, the sums once, after the last slice

Shape letters: B samples, S positions of a slice on this rank, T = B·S tokens, E experts, k choices per token, P pieces
of a micro-batch, R runs of consecutive positions on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.context_parallel.share import Share
from megapar.moe.capacity import capacity_on_device, keep_by_order, keep_by_probability, queue_starts
from megapar.moe.dispatch_bytes import dispatched_rows
from megapar.moe.router import Routing
from megapar.moe.sizes import MoeSizes
from megapar.moe.slicing import Slicing
from megapar.moe.stats import MoeStats, RouterSums, add_sums, count_pairs, gather_sums

Totals = tuple[RouterSums, Tensor]  # sums of the micro-batch, and [P, k, E] counts of the pieces that add up to it


class QueuePlace(NamedTuple):
    """The place of a rank's tokens in the experts' queues.

    Attributes:
        counts: [P, k, E] pairs of the pieces that share a capacity, in token order.
        runs: (piece, positions) of each run of these tokens; of a zig-zag rank ((0, 8), (3, 8)), pieces 0 and 3.
        capacity: Pairs that an expert keeps; a tensor if the host does not have it.
        slice_number: The slice of these tokens; None: they are the whole sequence.
    """

    counts: Tensor
    runs: tuple[tuple[int, int], ...]
    capacity: int | Tensor
    slice_number: int | None = None


@dataclass(eq=False)
class MicroBatchRouting:
    """The pairs of a micro-batch to keep, decided slice by slice in order, and the sums of its statistics.

    Attributes:
        share: The ranks that share the positions of the micro-batch.
        local_capacity: This rank decides alone which of its pairs are kept.
        tokens: Non-padding tokens of the micro-batch on all ranks, a number on the host.
        capacity: Pairs that an expert keeps over all slices.
    """

    sizes: MoeSizes
    share: Share
    slicing: Slicing
    local_capacity: bool = field(kw_only=True)
    tokens: int = field(kw_only=True)
    capacity: int | Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        self.shares_batch = self.share.size > 1
        self._sums: list[RouterSums] = []
        self._totals: Totals | None = None
        self._orthogonal: Tensor | None = None
        self._before_kE: Tensor | None = None

    def keep(self, routing: Routing, valid_T: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Return the pairs of the next slice that reach an expert, [T, k] bool; None: all of them.

        Collective over the ranks that share the micro-batch. length: Positions of the slice on this rank.
        """
        self._orthogonal = routing.orthogonal  # the same for every slice
        if self.slicing.active:
            place = self._place_of_slice(routing, length) if self.sizes.has_capacity else None
            self._sums.append(routing.sums)
        else:
            place = self._place_of_all(routing, valid_T, batch, length)
        if place is None or not self.sizes.has_capacity:
            return None if valid_T is None else valid_T[:, None].expand_as(routing.experts)
        return self._within_capacity(routing, place, valid_T, batch)

    def room(self, positions: int, *, even_splits: bool, padded: bool) -> tuple[int, bool]:
        """Return (rows to allocate if no counts are exchanged, True if that is the exact number) for the next slice.

        Args:
            positions: Positions of the slice on this rank in all samples, including padding.
            padded: Some positions may be padding.
        """
        sizes = self.sizes
        if even_splits:
            # Padding may differ between the ranks of ep, but the numbers of rows they exchange may not.
            return dispatched_rows(sizes, positions, positions, even=True), False
        if self.slicing.active:  # room for all pairs of the slice
            return positions * sizes.topk, not (sizes.has_capacity or padded)
        queued = positions if self.shares_batch else self.tokens
        exact = not (sizes.has_capacity or (self.shares_batch and padded))
        return dispatched_rows(sizes, queued, self.tokens, even=False), exact

    def stats(self) -> MoeStats:
        """Return the statistics of the micro-batch, summed over all ranks and slices; call it after the last slice."""
        sizes = self.sizes
        sums, counts_PkE = self._sum_slices() if self._totals is None else self._totals
        first_only = sizes.has_capacity and sizes.drop_policy == "choice"
        stats = MoeStats.of(sums, self.tokens, sizes.topk, first_choices_only=first_only, orthogonal=self._orthogonal)
        if not sizes.has_capacity:
            return stats
        if self.slicing.active and self.slicing.capacity == "slice":
            return stats._replace(over=self._dropped_by_slice())
        # Under every policy, an expert drops only what exceeds its capacity.
        over = stats.load - sizes.capacity(self.tokens)
        if self.shares_batch and self.local_capacity:
            over = counts_PkE.sum(1) - capacity_on_device(sizes, counts_PkE[:, 0].sum(1))[:, None]
        return stats._replace(over=over.clamp(min=0).sum())

    def _sum_slices(self) -> Totals:
        sums = add_sums(self._sums)
        return gather_sums(sums, self.share) if self.shares_batch else (sums, sums.counts[None])

    def _dropped_by_slice(self) -> Tensor:
        """Count the dropped pairs when every slice has a separate capacity."""
        counts_PdkE = torch.stack([sums.counts for sums in self._sums])[None]
        if self.shares_batch:
            counts_PdkE = self.share.gather(counts_PdkE)
        if not (self.shares_batch and self.local_capacity):
            counts_PdkE = counts_PdkE.sum(0, keepdim=True)
        capacity_Pd = capacity_on_device(self.sizes, counts_PdkE[:, :, 0].sum(2))
        over_PdE = counts_PdkE.sum(2) - capacity_Pd[:, :, None]
        return over_PdE.clamp(min=0).sum()

    def _place_of_all(self, routing: Routing, valid_T: Tensor | None, batch: int, length: int) -> QueuePlace:
        """Return the queue place of the only slice; the counts are gathered together with the sums of all ranks."""
        own_PkE, capacity = routing.sums.counts[None], self.capacity
        runs: tuple[tuple[int, int], ...] = ((0, length),)
        if not self.shares_batch:
            self._totals = routing.sums, own_PkE
        elif self.local_capacity or not self.sizes.has_capacity:
            self._totals = gather_sums(routing.sums, self.share)
            if self.local_capacity:
                capacity = capacity_on_device(self.sizes, own_PkE[0, 0].sum())
        else:
            runs, most, order = self.share.runs(length)
            counts_RkE = self._counts_by_run(routing, valid_T, batch, [positions for _, positions in runs], most)
            self._totals = gather_sums(routing.sums, self.share, counts_RkE)
            own_PkE = self.share.sort(self._totals[1], order)
        return QueuePlace(own_PkE, runs, capacity)

    def _place_of_slice(self, routing: Routing, length: int) -> QueuePlace:
        """Return the queue place of the next of many slices."""
        sizes, number = self.sizes, len(self._sums)
        counts_PkE, piece = routing.sums.counts[None], 0
        if not self.local_capacity:  # ranks are in order of position in this slice
            order = self.share.slice_order(number)
            counts_PkE, piece = self.share.sort(self.share.gather(counts_PkE), order), order.index(self.share.rank)
        if self.slicing.capacity == "slice":
            capacity = capacity_on_device(sizes, counts_PkE[:, 0].sum())
            return QueuePlace(counts_PkE, ((piece, length),), capacity, number)
        if self._before_kE is None:
            self._before_kE = torch.zeros_like(counts_PkE[0])
        before_kE, self._before_kE = self._before_kE, self._before_kE + counts_PkE.sum(0)
        counts_PkE = torch.cat([before_kE[None], counts_PkE])
        return QueuePlace(counts_PkE, ((piece + 1, length),), self.capacity)

    def _within_capacity(self, routing: Routing, place: QueuePlace, valid_T: Tensor | None, batch: int) -> Tensor:
        """Return the pairs within the capacity of their experts: [T, k] bool."""
        policy, capacity = self.sizes.drop_policy, place.capacity
        # Queues are in token order: position, then sample. Tokens are by sample, then position.
        experts_Tk = _by_position(routing.experts, batch)
        valid_by_position = None if valid_T is None else _by_position(valid_T, batch)
        if policy == "probs":
            kept_Tk = keep_by_probability(
                experts_Tk,
                valid_by_position,
                _by_position(routing.probs, batch),
                capacity=capacity,
                share=None if self.local_capacity else self.share,
                own_length=len(experts_Tk) // batch,
                number=place.slice_number,
            )
            return _by_sample(kept_Tk, batch)
        kept, start = [], 0
        for number, positions in place.runs:
            rows = slice(start * batch, (start + positions) * batch)
            starts_kE = queue_starts(place.counts, number, policy)
            valid_rows = None if valid_by_position is None else valid_by_position[rows]
            kept.append(keep_by_order(experts_Tk[rows], valid_rows, starts_kE, capacity=capacity, policy=policy))
            start += positions
        return _by_sample(kept[0] if len(kept) == 1 else torch.cat(kept), batch)

    def _counts_by_run(
        self, routing: Routing, valid_T: Tensor | None, batch: int, positions: Sequence[int], most: int
    ) -> Tensor:
        """Count the pairs of each run of this rank's positions, with zeros after the last run: [most, k, E]."""
        if most == 1:
            return routing.sums.counts[None]
        rows = [n * batch for n in positions]
        experts = _by_position(routing.experts, batch).split(rows)
        valid = [None] * len(rows) if valid_T is None else _by_position(valid_T[:, None], batch).split(rows)
        counts = [count_pairs(e, v, self.sizes.num_experts) for e, v in zip(experts, valid, strict=True)]
        return torch.stack(counts + [torch.zeros_like(counts[0])] * (most - len(counts)))


def _by_position(x: Tensor, batch: int) -> Tensor:
    """Reorder [B·S, ...] to [S·B, ...]."""
    return x.unflatten(0, (batch, -1)).transpose(0, 1).flatten(0, 1)


def _by_sample(x: Tensor, batch: int) -> Tensor:
    """Reorder [S·B, ...] to [B·S, ...]."""
    return x.unflatten(0, (-1, batch)).transpose(0, 1).flatten(0, 1)
