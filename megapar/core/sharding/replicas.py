"""The replica guard: parameters that are replicated must have the same bits on all their ranks.

A rank with faulty memory or arithmetic silently continues with different weights, and every later step spreads the
damage. A 64-bit digest per tensor, compared by one all-reduce per axis, detects this at the cost of one pass over the
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm import json_messages as messages
from megapar.core.comm.agreement import gather_numbers, reduce_numbers
from megapar.core.comm.axis import Axis
from megapar.core.comm.world import World
from megapar.core.sharding.cut import ParameterInfo
from megapar.errors import CorruptionError
from megapar.health.corruption.step_digest import INTEGERS

WIDTH = 4096
SHOWN = 5
Row: TypeAlias = tuple[str, str, list[int], bool]
"""A difference: (text, parameter, ranks, True if those ranks are at fault, False if the faulty ones are unknown)."""


@dataclass(frozen=True)
class Replica:
    """A tensor of this rank that must have the same bits on every rank of an axis."""

    name: str
    tensor: Tensor
    axis: Axis


def axes_of(spec: ParameterInfo, world: World, *, sharded: bool) -> list[Axis]:
    """Return the axes over which a parameter is replicated. sharded: its sharding ranks have different pieces."""
    kind = "expert_" if spec.expert else ""
    names = [f"{kind}replica"] if sharded else [f"{kind}replica", f"{kind}shard"]
    kept = ("ep", "emp") if spec.expert else ("mp",)
    names += [name for name in kept if name not in dict(spec.axes)]
    return [axis for axis in map(world.axis, names) if axis.group is not None]


def replica_digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of a tensor, int64 on its device: equal for equal bits, different if a few bits differ.

    The elements, as integers, are summed in WIDTH columns, which are added with different odd weights, modulo 2**64.
    """
    flat = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    whole = flat.numel() // WIDTH * WIDTH
    columns = torch.zeros(WIDTH, dtype=torch.int64, device=flat.device)
    columns[: flat.numel() - whole] = flat[whole:].to(torch.int64)
    if whole:
        columns += flat[:whole].view(-1, WIDTH).sum(0, dtype=torch.int64)
    weights = torch.arange(1, 2 * WIDTH, 2, device=flat.device) * 0x9E3779B97F4A7C1
    return (columns * weights).sum()


def check(replicas: Iterable[Replica], world: World, when: str) -> bool:
    """Compare all replicas; return True if there are any. Raises CorruptionError on every rank if they differ.

    The error names the parameters and the ranks. Collective: every rank of the world calls it, with the same names on
    each axis. when: the beginning of the message.
    """
    by_axis: dict[tuple[int, ...], list[Replica]] = {}
    for replica in replicas:
        by_axis.setdefault(replica.axis.ranks, []).append(replica)
    device = world.device.torch_device
    differences = [row for same in by_axis.values() for row in _compare(same, device)]
    all_ranks = world.axis("world")
    counts = torch.tensor([len(differences), len(by_axis)], dtype=torch.int64, device=device)
    reduce_numbers(counts, all_ranks, "replicas")
    bad, compared = counts.tolist()
    if bad:
        parts: list[Any] = [differences]
        if all_ranks.group is not None:
            parts = messages.all_gather([list(row) for row in differences], all_ranks.group)
        raise _error([row for part in parts for row in part], when)
    return bool(compared)


def _error(rows: Sequence[Row], when: str) -> CorruptionError:
    texts = list(dict.fromkeys(text for text, *_ in rows))
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    known = [row for row in rows if row[3]] or rows
    return CorruptionError(
        f"{when}: replicas of parameters differ: {'; '.join(texts[:SHOWN])}{more}. The memory or the arithmetic "
        "of a rank is faulty. Check its hardware, and resume from an earlier checkpoint.",
        sorted({rank for row in known for rank in row[2]}),
        list(dict.fromkeys(name for _, name, *_ in rows)),
    )


def _compare(replicas: Sequence[Replica], device: torch.device) -> list[Row]:
    axis = replicas[0].axis
    # Offloaded masters are in host memory, and the group may reach only the device.
    digests = torch.stack([replica_digest(replica.tensor).to(device) for replica in replicas])
    extremes = torch.cat([digests, ~digests])
    reduce_numbers(extremes, axis, "replicas", dist.ReduceOp.MAX)
    greatest, least = extremes[: len(replicas)], ~extremes[len(replicas) :]
    wrong = (greatest != least).nonzero().flatten().tolist()
    if not wrong:
        return []
    gathered = gather_numbers(digests, axis, "replicas")
    return [_differing(replicas[i].name, axis, [int(g[i].item()) for g in gathered]) for i in wrong]


def _differing(name: str, axis: Axis, digests: Sequence[int]) -> Row:
    usual = max(digests, key=digests.count)
    odd = [rank for rank, value in zip(axis.ranks, digests, strict=True) if value != usual]
    others = [rank for rank in axis.ranks if rank not in odd]
    if len(odd) >= len(others):  # no majority
        return f"{name} on ranks {list(axis.ranks)} of {axis.name}", name, list(axis.ranks), False
    return f"{name} on ranks {odd}, against {others} of {axis.name}", name, odd, True
