"""Arithmetic of ranks over the named axes of the device mesh.

The same ranks are factorized twice. The dense view orders dp, pp, sharding, cp, mp (outermost first; the order is
configurable). The expert view flattens (dp, sharding, cp, mp) inside every pipeline stage, always in this order, and
cuts the result into (edp, ep, emp), ``emp`` innermost.
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
    """Sizes of all axes of the device mesh.

    Raises ValueError if ``order`` is not a permutation of the dense axes, if emp does not divide mp, or if ep neither
    divides sharding * cp * mp / emp nor is a multiple of it that divides a stage's ranks / emp.

    Attributes:
        dp: Data parallel replicas; outside ``sharding`` this is hybrid sharding (HSDP).
        sharding: Data parallel ranks that shard parameters or optimizer state.
        ep: Expert parallel ranks, a factor of the ranks of one pipeline stage.
        emp: Tensor parallel ranks of experts, another factor; ``edp`` is the remaining one.
        order: Dense axes, outermost first.
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
            raise ValueError(f"rank order {','.join(self.order)} is not a permutation of {','.join(DENSE_AXES)}")
        sizes = {axis: self.size(axis) for axis in (*DENSE_AXES, "ep", "emp")}
        if min(sizes.values()) < 1:
            raise ValueError(f"every axis needs at least one rank, got {sizes}")
        inner = self.sharding * self.cp * self.mp // self.emp
        if self.mp % self.emp or (inner % self.ep and self.ep % inner):
            raise ValueError(
                f"ep {self.ep} neither divides nor is a multiple of the {inner} ranks of sharding {self.sharding} x "
                f"cp {self.cp} x mp {self.mp} / emp {self.emp}"
            )
        if self.stage_ranks % (self.ep * self.emp):
            raise ValueError(f"ep {self.ep} x emp {self.emp} does not divide the {self.stage_ranks} ranks of a stage")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.sharding * self.cp * self.mp

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.dp * self.sharding * self.cp * self.mp

    @property
    def edp(self) -> int:
        """Number of replicas, or shards, of one expert."""
        return self.stage_ranks // (self.ep * self.emp)

    @property
    def shards(self) -> int:
        """Number of shards of a dense parameter: (sharding, cp) flattened."""
        return self.sharding * self.cp

    @property
    def expert_shards(self) -> int:
        """Number of shards of an expert parameter: ``edp`` without its dp part, which is replicated."""
        return max(1, self.sharding * self.cp * self.mp // (self.ep * self.emp))

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different data: dp * sharding."""
        return self.dp * self.sharding

    def size(self, axis: str) -> int:
        """Return the number of ranks along one axis of either view."""
        return int(getattr(self, axis))

    def rank(self, **coordinates: int) -> int:
        """Return the global rank at dense coordinates; missing axes are at 0."""
        rank = 0
        for axis in self.order:
            rank = rank * self.size(axis) + coordinates.get(axis, 0)
        return rank

    def dense(self, rank: int) -> dict[str, int]:
        """Return the dense coordinates of a rank."""
        coordinates = {}
        for axis in reversed(self.order):
            rank, coordinates[axis] = divmod(rank, self.size(axis))
        return {axis: coordinates[axis] for axis in DENSE_AXES}

    def expert(self, rank: int) -> dict[str, int]:
        """Return the expert coordinates of a rank: pp, edp, ep, emp."""
        at = self.dense(rank)
        flat = 0
        for axis in ("dp", "sharding", "cp", "mp"):
            flat = flat * self.size(axis) + at[axis]
        outer, emp = divmod(flat, self.emp)
        edp, ep = divmod(outer, self.ep)
        return {"pp": at["pp"], "edp": edp, "ep": ep, "emp": emp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on all axes of both views."""
        return {**self.dense(rank), **self.expert(rank)}

    @cached_property
    def _expert_rank(self) -> dict[tuple[int, ...], int]:
        ranks = {}
        for rank in range(self.world_size):
            at = self.expert(rank)
            ranks[tuple(at[axis] for axis in EXPERT_AXES)] = rank
        return ranks

    def group(self, axes: str | Sequence[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on these axes of one view, the last named axis fastest."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if (names, rank) not in self._groups:
            self._groups[names, rank] = self._find_group(names, rank)
        return self._groups[names, rank]

    @cached_property
    def _groups(self) -> dict[tuple[tuple[str, ...], int], tuple[int, ...]]:
        """The groups that were found: every parameter asks for the same few."""
        return {}

    def _find_group(self, names: tuple[str, ...], rank: int) -> tuple[int, ...]:
        dense = all(axis in DENSE_AXES for axis in names)
        if not dense and not all(axis in EXPERT_AXES for axis in names):
            raise ValueError(f"axes {names} are not of one view: {DENSE_AXES} or {EXPERT_AXES}")
        base = self.dense(rank) if dense else self.expert(rank)
        ranks = []
        for values in product(*(range(self.size(axis)) for axis in names)):
            at = {**base, **dict(zip(names, values, strict=True))}
            ranks.append(self.rank(**at) if dense else self._expert_rank[tuple(at[a] for a in EXPERT_AXES)])
        return tuple(ranks)

    def shard_group(self, rank: int, *, expert: bool) -> tuple[int, ...]:
        """Return the ranks that shard the master weights of a dense (or an expert) parameter, in order of shards."""
        if not expert:
            return self.group(("sharding", "cp"), rank)
        replica = self.expert(rank)["edp"] // self.expert_shards
        return self.group("edp", rank)[replica * self.expert_shards : (replica + 1) * self.expert_shards]

    def replica_group(self, rank: int, *, expert: bool) -> tuple[int, ...]:
        """Return the ranks with the same shard of the master weights of a dense (or an expert) parameter."""
        if not expert:
            return self.group("dp", rank)
        return self.group("edp", rank)[self.expert(rank)["edp"] % self.expert_shards :: self.expert_shards]

    def groups(self, axes: str | Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return all groups along these axes, ordered by their first rank. Each rank of the world is in one of them."""
        seen: set[int] = set()
        groups = []
        for rank in range(self.world_size):
            if rank not in seen:
                group = self.group(axes, rank)
                seen.update(group)
                groups.append(group)
        return tuple(groups)

    def ep_node_ranks(self, ranks_per_node: int) -> int | None:
        """Return the number of ranks that every group of ep has on each of its nodes.

        The ranks of a node are consecutive in the group, and at the same places on each node. Returns ``ep`` if every
        group is on one node, and None if groups are not whole nodes of equal size.
        """
        digits = self._ep_digits()
        if digits is None or self.world_size % ranks_per_node:
            return None
        end = max((stride * count for count, stride, in_ep in digits if in_ep), default=1)
        if ranks_per_node % end == 0:
            return self.ep
        ranks, complete = 1, True
        for count, stride, in_ep in digits:  # innermost first in the expert view
            inside = max(1, min(count, ranks_per_node // stride))
            if count % inside or (stride < ranks_per_node and ranks_per_node % (stride * inside)):
                return None  # a node ends inside a step of this axis
            if in_ep:
                if inside > 1 and not complete:
                    return None  # an axis further out is inside the node, one further in is not
                ranks, complete = ranks * inside, complete and inside == count
        return ranks

    def _ep_digits(self) -> list[tuple[int, int, bool]] | None:
        """Return the axes as (size, stride in ranks, belongs to ep), in the expert view innermost first, then pp.

        Axes whose ranks are consecutive are one. Returns None if ep ends inside a step of an axis.
        """
        strides, weight = {}, 1
        for axis in reversed(self.order):
            strides[axis], weight = weight, weight * self.size(axis)
        merged: list[tuple[int, int]] = []
        for axis in ("mp", "cp", "sharding", "dp"):
            count, stride = self.size(axis), strides[axis]
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1] = merged[-1][0] * count, merged[-1][1]
            elif count > 1:
                merged.append((count, stride))
        digits, weight = [], 1
        for count, stride in merged:
            for end in (self.emp, self.emp * self.ep):
                if weight < end < weight * count:
                    part = end // weight
                    if end % weight or count % part:
                        return None
                    digits.append((part, stride, self.emp <= weight < self.emp * self.ep))
                    count, stride, weight = count // part, stride * part, end
            digits.append((count, stride, self.emp <= weight < self.emp * self.ep))
            weight *= count
        return [*digits, (self.pp, strides["pp"], False)] if self.pp > 1 else digits

    def describe(self) -> str:
        """Return the sizes of the dense axes in rank order, then those of the expert view."""
        dense = " x ".join(f"{axis} {self.size(axis)}" for axis in self.order)
        expert = " x ".join(f"{axis} {self.size(axis)}" for axis in EXPERT_AXES)
        return f"{dense} = {self.world_size} ranks; experts: {expert}"
