"""Which piece of every parameter a rank masters, as arithmetic. Standard library only.

mp, ep and emp cut first, along the dims that the parameter's ``axes`` name. Sharding then cuts the local piece, along
its largest dim that the degree divides, so that no rank is left empty; where none divides, along the dim that wastes
least on padding (8 groups over 168 ranks would take 21 times the memory). FSDP2, which is stage 3, pads dim 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megapar.core.box import Box
from megapar.core.grid import Grid


class ParameterInfo(Protocol):
    """What sharding needs to know of a parameter; the models' parameter tables have it."""

    @property
    def name(self) -> str:
        """Unique name in the model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(mesh axis, dim it splits) pairs."""

    @property
    def unit(self) -> str:
        """The layer it lives in."""

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""

    @property
    def router(self) -> bool:
        """Whether it is a router's weight."""

    @property
    def fp32(self) -> bool:
        """Whether it is computed with in fp32 whatever the compute dtype."""

    @property
    def expert(self) -> bool:
        """Whether it is cut over the expert view's replicas instead of (sharding, cp)."""

    @property
    def stage(self) -> int:
        """The coordinate on pp that answers for it; a tied embedding lies on the last one too."""


def shard_dim(sizes: Sequence[int], parts: int, *, full: bool = False) -> int:
    """The dim along which ``parts`` ranks share a tensor: the largest that ``parts`` divides.

    Where there is none, the one with the least padding, or with ``full`` (stage 3) dim 0.
    """
    even = [dim for dim, size in enumerate(sizes) if size % parts == 0 and size > 0]
    if even:
        return max(even, key=lambda dim: (sizes[dim], -dim))
    if full:
        return 0
    return min(range(len(sizes)), key=lambda dim: (-(-sizes[dim] // parts) * parts / max(1, sizes[dim]), dim))


def box_at(spec: ParameterInfo, places: Mapping[str, tuple[int, int]]) -> Box:
    """The piece that the rank at ``places`` holds: axis -> (size, this rank's coordinate); other axes do not cut."""
    box = Box.whole(spec.shape)
    for axis, dim in spec.axes:
        size, rank = places.get(axis, (1, 0))
        box = box.cut(dim, size, rank)
    return box


def local_box(spec: ParameterInfo, grid: Grid, rank: int) -> Box:
    """The piece a rank computes with: the whole, cut by mp, ep and emp."""
    at = grid.coordinates(rank)
    box = Box.whole(spec.shape)
    for axis, dim in spec.axes:
        box = box.cut(dim, grid.size(axis), at[axis])
    return box


def master_box(spec: ParameterInfo, grid: Grid, rank: int, *, full: bool = False) -> Box:
    """The piece whose master copy and optimizer state a rank keeps. full: at stage 3."""
    box = local_box(spec, grid, rank)
    parts = grid.expert_shards if spec.expert else grid.shards
    return box.cut(
        shard_dim(box.sizes, parts, full=full), parts, grid.shard_group(rank, expert=spec.expert).index(rank)
    )


def is_speaker(spec: ParameterInfo, grid: Grid, rank: int) -> bool:
    """Whether this rank is the one that answers for a tensor that every rank of its stage has whole."""
    return rank == grid.rank(pp=spec.stage)


def is_primary(spec: ParameterInfo, grid: Grid, rank: int) -> bool:
    """Whether this rank is the one that answers for its piece among the ranks that hold the same."""
    at = grid.coordinates(rank)
    if at["pp"] != spec.stage or grid.replica_group(rank, expert=spec.expert)[0] != rank:
        return False
    split = {axis for axis, _ in spec.axes}
    kept = ("ep", "emp") if spec.expert else ("mp",)
    return all(axis in split or at[axis] == 0 for axis in kept)
