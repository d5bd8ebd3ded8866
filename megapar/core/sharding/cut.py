"""The cut of parameters: the piece of each whose master weights a rank has, as arithmetic.

mp, ep and emp cut first, along the dims that the parameter's ``axes`` name. Sharding then cuts the local piece along
its first dim that the degree divides, so that no rank is left empty, and pieces are contiguous in as long runs as can
be. If it divides none, sharding cuts the dim with the least padding (8 groups over 168 ranks would take 21 times the
memory). FSDP2, used for stage 3, pads dim 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megapar.core.box import Box
from megapar.core.grid import Grid

ALIGNED_BYTES = 16


class ParameterInfo(Protocol):
    """The facts about a parameter that sharding needs; a row of a model's parameter table.

    Attributes:
        name: Unique in the model.
        axes: Pairs (mesh axis, dim that it splits).
        unit: The layer that contains it.
        decay: True if weight decay applies.
        router: True for the weight of a router.
        decoupled: True if it has the learning rate of word embeddings and heads, where that is another one.
        lr_factor: Factor of its learning rate, which leaves its weight decay.
        fp32: True if computations use it in fp32, whatever the compute dtype.
        matrix: True if an optimizer updates it as whole matrices.
        expert: True if it is sharded over the expert view's shard axis instead of (sharding, cp).
        stage: The pp coordinate that owns it; a tied embedding is on the last stage too.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def unit(self) -> str: ...
    @property
    def decay(self) -> bool: ...
    @property
    def router(self) -> bool: ...
    @property
    def decoupled(self) -> bool: ...
    @property
    def lr_factor(self) -> float: ...
    @property
    def matrix(self) -> bool: ...
    @property
    def fp32(self) -> bool: ...
    @property
    def expert(self) -> bool: ...
    @property
    def stage(self) -> int: ...


def shard_dim(sizes: Sequence[int], num_pieces: int, *, full: bool = False) -> int:
    """Return the dim along which ``num_pieces`` ranks shard a tensor: the first one that ``num_pieces`` divides.

    If there is none, return the dim with the least padding, or dim 0 with ``full`` (stage 3).
    """
    even = [dim for dim, size in enumerate(sizes) if size % num_pieces == 0 and size > 0]
    if even:
        return even[0]
    if full:
        return 0
    return min(range(len(sizes)), key=lambda dim: (-(-sizes[dim] // num_pieces) * num_pieces / max(1, sizes[dim]), dim))


def box_at(spec: ParameterInfo, places: Mapping[str, tuple[int, int]]) -> Box:
    """Return the piece of the rank at ``places``: axis -> (size, this rank's coordinate). Other axes do not cut."""
    box = Box.whole(spec.shape)
    for axis, dim in spec.axes:
        size, rank = places.get(axis, (1, 0))
        box = box.cut(dim, size, rank)
    return box


def local_box(spec: ParameterInfo, grid: Grid, rank: int) -> Box:
    """Return the piece that a rank computes with: the whole tensor, cut by mp, ep and emp."""
    return _local_box(spec, grid, grid.coordinates(rank))


def _local_box(spec: ParameterInfo, grid: Grid, at: Mapping[str, int]) -> Box:
    return box_at(spec, {axis: (grid.size(axis), at[axis]) for axis, _ in spec.axes})


def master_box(spec: ParameterInfo, grid: Grid, rank: int, *, full: bool = False) -> Box:
    """Return the piece whose master weights and optimizer state a rank keeps. full: stage 3."""
    at = grid.coordinates(rank)
    box = _local_box(spec, grid, at)
    num_pieces = grid.expert_shards if spec.expert else grid.shards
    # The rank's place in its ``shard_group``, without the group, which has as many ranks.
    place = at["edp"] % num_pieces if spec.expert else at["sharding"] * grid.cp + at["cp"]
    return box.cut(shard_dim(box.sizes, num_pieces, full=full), num_pieces, place)


def is_speaker(spec: ParameterInfo, grid: Grid, rank: int) -> bool:
    """Return True if this rank represents its stage for a tensor that is whole on every rank of the stage."""
    return rank == grid.rank(pp=spec.stage)


def is_primary(spec: ParameterInfo, grid: Grid, rank: int) -> bool:
    """Return True if this rank represents all ranks that have the same piece (in the norm and in checkpoints)."""
    at = grid.coordinates(rank)
    if at["pp"] != spec.stage or grid.replica_group(rank, expert=spec.expert)[0] != rank:
        return False
    split = {axis for axis, _ in spec.axes}
    kept = ("ep", "emp") if spec.expert else ("mp",)
    return all(axis in split or at[axis] == 0 for axis in kept)


def keeps_aligned(elements: int, item_bytes: int) -> bool:
    """Return whether what follows ``elements`` in a row begins at a multiple of 16 bytes, as kernels of products do."""
    return elements * item_bytes % ALIGNED_BYTES == 0
