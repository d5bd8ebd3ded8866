"""The order in which the communicators of a device mesh are created.

If the device is bound to the process, torch creates a group by splitting the world's communicator (``ncclCommSplit``),
and every rank must participate in every split. Groups are therefore created in rounds, and every rank is in exactly one
group of each round:

    axes      one round for all axes whose groups have the same ranks
    queues    one round for each direction of every other edge of the ring of stages; a stage without a partner is
              alone

                  stages 0 1 2 3      0>1 2>3 | 1>0 3>2 | 1>2 3>0 | 2>1 0>3
                  stages 0 1 2        0>1 2   | 1>0 2   | 1>2 0   | 2>1 0   | 2>0 1 | 0>2 1
"""

from __future__ import annotations

from megapar.core.grid import Grid

# "shard" and "expert_shard" shard the master weights, "replica" and "expert_replica" replicate them. The ranks along
# "data" read different samples.
AXES: tuple[str, ...] = (
    *("dp", "pp", "sharding", "cp", "mp", "data", "shard", "replica"),
    *("edp", "ep", "emp", "expert_shard", "expert_replica"),
)
# Data ranks exchange counts while gradients are being reduced. The rows of experts, the keys and values of context
# parallelism, and the buckets of sharding overlap by design, so these axes never share a communicator with another axis
# of the same ranks.
_ALONE = ("ep", "cp")


def axis_ranks(grid: Grid, axis: str, rank: int) -> tuple[int, ...]:
    """Return the global ranks along a named axis through ``rank``, in coordinate order."""
    composed = {
        "data": lambda: grid.group(("dp", "sharding"), rank),
        "shard": lambda: grid.shard_group(rank, expert=False),
        "replica": lambda: grid.replica_group(rank, expert=False),
        "expert_shard": lambda: grid.shard_group(rank, expert=True),
        "expert_replica": lambda: grid.replica_group(rank, expert=True),
    }
    return composed[axis]() if axis in composed else grid.group(axis, rank)


def axis_rounds(grid: Grid) -> tuple[tuple[str, ...], ...]:
    """Return the axes of more than one rank, grouped by the communicator they share, in order of creation."""
    shared: dict[object, list[str]] = {}
    for axis in AXES:
        count, step = _places(grid, axis)
        if count > 1:
            key = axis if axis == "pp" or axis in _ALONE else (count, step)
            shared.setdefault(key, []).append(axis)
    return tuple(map(tuple, shared.values()))


def axis_size(grid: Grid, axis: str) -> int:
    """Return the number of ranks along a named axis, without a look at the ranks."""
    return _places(grid, axis)[0]


def _places(grid: Grid, axis: str) -> tuple[int, int]:
    """Return (number, stride) of a group's positions among the ranks of a stage, in the order of the expert view."""
    inner, shards = grid.ep * grid.emp, grid.expert_shards
    return {
        "pp": (grid.pp, 0),
        "dp": (grid.dp, grid.sharding * grid.cp * grid.mp),
        "sharding": (grid.sharding, grid.cp * grid.mp),
        "cp": (grid.cp, grid.mp),
        "mp": (grid.mp, 1),
        "data": (grid.data_ranks, grid.cp * grid.mp),
        "shard": (grid.shards, grid.mp),
        "replica": (grid.dp, grid.shards * grid.mp),
        "edp": (grid.edp, inner),
        "ep": (grid.ep, grid.emp),
        "emp": (grid.emp, 1),
        "expert_shard": (shards, inner),
        "expert_replica": (grid.edp // shards, inner * shards),
    }[axis]


def queue_rounds(stages: int, *, closed: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return rounds of queues between neighbouring stages: (sender, receiver), or one stage alone.

    ``closed``: the last and the first stage exchange messages too, as interleaved schedules need it.
    """
    edges = [(stage, stage + 1) for stage in range(stages - 1)]
    if closed and stages > 2:
        edges.append((stages - 1, 0))
    # The edge that closes a ring of odd length touches one edge of each kind, so it needs a third kind.
    kinds = [2 if edge[1] == 0 and stages % 2 else edge[0] % 2 for edge in edges]
    rounds = []
    for kind in sorted(set(kinds)):
        forward = [edge for edge, its_kind in zip(edges, kinds, strict=True) if its_kind == kind]
        paired = {stage for edge in forward for stage in edge}
        alone = [(stage,) for stage in range(stages) if stage not in paired]
        rounds.append((*forward, *alone))
        rounds.append((*((receiver, sender) for sender, receiver in forward), *alone))
    return tuple(rounds)
