"""An axis of all ranks, divided by node, for tests that need no ``World``."""

from __future__ import annotations

import torch.distributed as dist

from megapar.core.comm.axis import Axis, AxisNodes


def axis_by_node(rank: int, world_size: int, node: int) -> Axis:
    """The axis ep over the default group, with ``node`` ranks on each node; 0: not divided."""
    everyone = tuple(range(world_size))
    if not node:
        return Axis("ep", world_size, rank, dist.group.WORLD, everyone)
    start, place = rank - rank % node, rank % node
    axes = []
    for name, ranks in (("ep_between", everyone[place::node]), ("ep_within", everyone[start : start + node])):
        group = dist.new_group(ranks, use_local_synchronization=True) if len(ranks) > 1 else None
        axes.append(Axis(name, len(ranks), ranks.index(rank), group, ranks))
    return Axis("ep", world_size, rank, dist.group.WORLD, everyone, nodes=AxisNodes(*axes))
