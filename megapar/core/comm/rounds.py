"""The order in which a grid's communicators are made. Standard library only.

Where the device is bound to the process, torch makes a group by a split of the world's communicator
(``ncclCommSplit``), in which every rank takes part. So groups are made in rounds, and every rank is in exactly one
group of each:

    axes      one round for all axes whose groups have the same ranks
    queues    one round for each direction of every other edge of the ring of stages; who has no partner is alone

                  stages 0 1 2 3      0>1 2>3 | 1>0 3>2 | 1>2 3>0 | 2>1 0>3
                  stages 0 1 2        0>1 2   | 1>0 2   | 1>2 0   | 2>1 0   | 2>0 1 | 0>2 1
"""

from __future__ import annotations

from megapar.core.grid import Grid

# "shard" and "expert_shard" cut master copies, "replica" and "expert_replica" repeat them, "data" are the positions
# that read data of their own.
AXES: tuple[str, ...] = (
    *("dp", "pp", "sharding", "cp", "mp", "data", "shard", "replica"),
    *("edp", "ep", "emp", "expert_shard", "expert_replica"),
)
# Data ranks exchange counts while gradients are being reduced; experts' rows, keys and values, and sharding's segments
# overlap by design: these never share a communicator with another axis that has the same ranks.
_ALONE = ("ep", "cp")


def axis_ranks(grid: Grid, axis: str, rank: int) -> tuple[int, ...]:
    """Global ranks along a named axis through ``rank``, in coordinate order."""
    composed = {
        "data": lambda: grid.group(("dp", "sharding"), rank),
        "shard": lambda: grid.shard_group(rank, expert=False),
        "replica": lambda: grid.replica_group(rank, expert=False),
        "expert_shard": lambda: grid.shard_group(rank, expert=True),
        "expert_replica": lambda: grid.replica_group(rank, expert=True),
    }
    return composed[axis]() if axis in composed else grid.group(axis, rank)


def axis_rounds(grid: Grid) -> tuple[tuple[str, ...], ...]:
    """The axes of more than one rank, by the communicators they share, in the order in which these are made."""
    shared: dict[object, list[str]] = {}
    for axis in AXES:
        count, step = _places(grid, axis)
        if count > 1:
            key = axis if axis == "pp" or axis in _ALONE else (count, step)
            shared.setdefault(key, []).append(axis)
    return tuple(map(tuple, shared.values()))


def _places(grid: Grid, axis: str) -> tuple[int, int]:
    """(how many, how far apart) the places of a group are, counted as the expert view counts a stage's ranks."""
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
    """The queues between neighbouring stages: rounds of groups, each (sender, receiver) or one stage alone.

    closed: messages go between the last and the first stage too, as where chunks go round and round.
    """
    edges = [(stage, stage + 1) for stage in range(stages - 1)]
    if closed and stages > 2:
        edges.append((stages - 1, 0))
    # The edge that closes a ring of odd length meets one of either kind.
    kinds = [2 if edge[1] == 0 and stages % 2 else edge[0] % 2 for edge in edges]
    rounds = []
    for kind in sorted(set(kinds)):
        forth = [edge for edge, own in zip(edges, kinds, strict=True) if own == kind]
        paired = {stage for edge in forth for stage in edge}
        alone = [(stage,) for stage in range(stages) if stage not in paired]
        rounds.append((*forth, *alone))
        rounds.append((*((receiver, sender) for sender, receiver in forth), *alone))
    return tuple(rounds)
