"""Ranks as arithmetic over named axes. Standard library only.

The same ranks are factorised twice. The dense view orders dp, pp, sharding, cp, mp (outermost first; the order is
data). The expert view, inside every pipeline stage, flattens (dp, sharding, cp, mp), in this order whatever the dense
order is, and cuts the result into (edp, ep, emp), ``emp`` innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

DENSE_AXES = ("dp", "pp", "sharding", "cp", "mp")
EXPERT_AXES = ("pp", "edp", "ep", "emp")


@dataclass(frozen=True)
class Grid:
    """Sizes of all axes of the device mesh: data, pipeline, hybrid sharding, context, tensor and expert parallelism.

    ``dp`` outside ``sharding`` is hybrid sharding (HSDP). ``ep`` and ``emp`` factor the ranks of one pipeline
    stage; ``edp`` is what remains.

    Raises ValueError where ``order`` is no permutation of the dense axes, where emp does not divide mp, and where ep
    neither divides sharding * cp * mp / emp nor is a multiple of it that divides a stage's ranks / emp.
    """

    dp: int = 1
    pp: int = 1
    sharding: int = 1
    cp: int = 1
    mp: int = 1
    ep: int = 1
    emp: int = 1
    order: tuple[str, ...] = DENSE_AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(DENSE_AXES):
            raise ValueError(f"rank order {','.join(self.order)} is no permutation of {','.join(DENSE_AXES)}")
        sizes = {axis: self.size(axis) for axis in (*DENSE_AXES, "ep", "emp")}
        if min(sizes.values()) < 1:
            raise ValueError(f"every axis needs at least one rank, got {sizes}")
        inner = self.sharding * self.cp * self.mp // self.emp
        if self.mp % self.emp or (inner % self.ep and self.ep % inner):
            raise ValueError(
                f"ep {self.ep} neither divides nor is a multiple of the {inner} ranks that sharding {self.sharding}, "
                f"cp {self.cp} and mp {self.mp} / emp {self.emp} make"
            )
        if self.stage_ranks % (self.ep * self.emp):
            raise ValueError(f"ep {self.ep} x emp {self.emp} does not divide the {self.stage_ranks} ranks of a stage")

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp * self.pp * self.sharding * self.cp * self.mp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.sharding * self.cp * self.mp

    @property
    def edp(self) -> int:
        """Replicas (or shards) of one expert."""
        return self.stage_ranks // (self.ep * self.emp)

    @property
    def shards(self) -> int:
        """Pieces that sharding makes of a dense parameter: (sharding, cp) flattened."""
        return self.sharding * self.cp

    @property
    def expert_shards(self) -> int:
        """Pieces that sharding makes of an expert parameter: ``edp`` without its dp part, which is replicated."""
        return max(1, self.sharding * self.cp * self.mp // (self.ep * self.emp))

    @property
    def data_ranks(self) -> int:
        """Positions that read data of their own: dp * sharding."""
        return self.dp * self.sharding

    def size(self, axis: str) -> int:
        """Ranks along one axis of either view."""
        return int(getattr(self, axis))

    def rank(self, **coordinates: int) -> int:
        """The global rank at dense coordinates; axes not named stand at 0."""
        rank = 0
        for axis in self.order:
            rank = rank * self.size(axis) + coordinates.get(axis, 0)
        return rank

    def dense(self, rank: int) -> dict[str, int]:
        """Dense coordinates of a rank."""
        coordinates = {}
        for axis in reversed(self.order):
            rank, coordinates[axis] = divmod(rank, self.size(axis))
        return {axis: coordinates[axis] for axis in DENSE_AXES}

    def expert(self, rank: int) -> dict[str, int]:
        """Expert coordinates of a rank: pp, edp, ep, emp."""
        at = self.dense(rank)
        flat = 0
        for axis in ("dp", "sharding", "cp", "mp"):
            flat = flat * self.size(axis) + at[axis]
        rest, emp = divmod(flat, self.emp)
        edp, ep = divmod(rest, self.ep)
        return {"pp": at["pp"], "edp": edp, "ep": ep, "emp": emp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank on all axes of both views."""
        return {**self.dense(rank), **self.expert(rank)}

    @cached_property
    def _expert_rank(self) -> dict[tuple[int, ...], int]:
        ranks = {}
        for rank in range(self.world_size):
            at = self.expert(rank)
            ranks[tuple(at[axis] for axis in EXPERT_AXES)] = rank
        return ranks

    def group(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` on these axes alone (one view's axes), the last named axis fastest."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        dense = all(axis in DENSE_AXES for axis in names)
        if not dense and not all(axis in EXPERT_AXES for axis in names):
            raise ValueError(f"axes {names} are not of one view: {DENSE_AXES} or {EXPERT_AXES}")
        base = self.dense(rank) if dense else self.expert(rank)
        found = []
        for values in product(*(range(self.size(axis)) for axis in names)):
            at = {**base, **dict(zip(names, values, strict=True))}
            found.append(self.rank(**at) if dense else self._expert_rank[tuple(at[a] for a in EXPERT_AXES)])
        return tuple(found)

    def shard_group(self, rank: int, *, expert: bool) -> tuple[int, ...]:
        """Ranks among which a dense (or an expert) parameter's master copy is cut, in the order of the pieces."""
        if not expert:
            return self.group(("sharding", "cp"), rank)
        replica = self.expert(rank)["edp"] // self.expert_shards
        return self.group("edp", rank)[replica * self.expert_shards : (replica + 1) * self.expert_shards]

    def replica_group(self, rank: int, *, expert: bool) -> tuple[int, ...]:
        """Ranks that hold the same piece of a dense (or an expert) parameter's master copy."""
        if not expert:
            return self.group("dp", rank)
        return self.group("edp", rank)[self.expert(rank)["edp"] % self.expert_shards :: self.expert_shards]

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along these axes, ordered by their first rank; together they are the world, each rank once."""
        seen: set[int] = set()
        found = []
        for rank in range(self.world_size):
            if rank not in seen:
                group = self.group(axes, rank)
                seen.update(group)
                found.append(group)
        return tuple(found)

    def describe(self) -> str:
        """Sizes in rank order, then the expert view where it differs from one expert replica per rank."""
        dense = " x ".join(f"{axis} {self.size(axis)}" for axis in self.order)
        expert = " x ".join(f"{axis} {self.size(axis)}" for axis in EXPERT_AXES)
        return f"{dense} = {self.world_size} ranks; experts: {expert}"
