"""What a rank of every stage sends in one optimizer step, by group and kind of collective, and over which links.

Names and counts are those of a run's ledger (``core/transport.py``): what one rank sends when nothing is sent twice;
what a recomputation sends again is not counted. Not in here: a few numbers per step that are summed over all ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from megapar.core.grid import Grid
from megapar.model.parameter import ParameterSpec
from megapar.planning.layout import Layout
from megapar.planning.work import Work
from megapar.training.segments import ITEM_BYTES

_INNER_FIRST = ("mp", "cp", "sharding", "dp")


@dataclass(frozen=True)
class Link:
    """A group as the network sees it. ranks: members. local: most of them on one node. nodes: that it touches."""

    axis: str
    ranks: int
    local: int
    nodes: int

    def outside(self, kind: str) -> float:
        """The share of what a rank sends that leaves its node."""
        if self.nodes <= 1:
            return 0.0
        if kind == "all_to_all":
            return (self.ranks - self.local) / max(1, self.ranks - 1)
        return 1.0 if kind == "send" else 1.0 / self.local  # of a ring, one of the node's ranks sends outside


def link(grid: Grid, axis: str, node: int) -> Link:
    """The group of rank 0 along an axis of the ledger, on nodes of ``node`` ranks.

    By arithmetic, where the group's ranks are a grid of their own, so that large worlds cost no more.
    """
    if axis == "world":
        return _reached(axis, [(grid.world_size, 1)], node)
    dense = {"shard": ("sharding", "cp"), "replica": ("dp",)}.get(axis, (axis,))
    if set(dense) <= set(grid.order):
        return _reached(axis, [(grid.size(name), _stride(grid, name)) for name in dense], node)
    shards, inner = grid.expert_shards, grid.ep * grid.emp
    # Every so many-th of a stage's ranks as the expert view counts them, and how many of those.
    step, count = {
        "emp": (1, grid.emp),
        "ep": (grid.emp, grid.ep),
        "edp": (inner, grid.edp),
        "expert_shard": (inner, shards),
        "expert_replica": (inner * shards, -(-grid.edp // shards)),
    }[axis]
    dims = _unfolded(grid, step, count)
    if dims is not None:
        return _reached(axis, dims, node)
    nodes = Counter(_rank(grid, place * step) // node for place in range(count))
    return Link(axis, count, max(nodes.values()), len(nodes))


def _stride(grid: Grid, axis: str) -> int:
    return prod(grid.size(name) for name in grid.order[grid.order.index(axis) + 1 :])


def _rank(grid: Grid, place: int) -> int:
    """The rank at a place of the first stage, as the expert view counts them."""
    dense = {}
    for axis in _INNER_FIRST:
        place, dense[axis] = divmod(place, grid.size(axis))
    return grid.rank(**dense)


def _unfolded(grid: Grid, step: int, count: int) -> list[tuple[int, int]] | None:
    """Every ``step``-th place of a stage, ``count`` of them, as (how many, stride) on the dense axes; None where they
    end inside an axis."""
    found, weight = [], 1
    for axis in _INNER_FIRST:
        size = grid.size(axis)
        if count > 1 and step < weight * size:
            here = min(count, weight * size // step)
            if (
                count % here
                or (weight * size) % step
                or step % weight
                or (here < count and here * step != weight * size)
            ):
                return None
            found.append((here, step // weight * _stride(grid, axis)))
            count, step = count // here, step * here
        weight *= size
    return found


def _reached(axis: str, dims: Sequence[tuple[int, int]], node: int) -> Link:
    """A group whose ranks are the sums of a multiple of each stride, given as (how many multiples, stride).

    Strides divide one another, as digits of a number do: a multiple of ``node`` leads to another node every time, and
    what the smaller ones reach lies between two of those.
    """
    merged: list[tuple[int, int]] = []
    for count, stride in sorted(dims, key=lambda dim: dim[1]):
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0] * count, merged[-1][1]
        elif count > 1:
            merged.append((count, stride))
    inner = [dim for dim in merged if dim[1] % node]
    nodes, local = prod(count for count, stride in merged if stride % node == 0), 1
    if len(inner) > 1:
        sums = (sum(places) for places in product(*(range(0, count * stride, stride) for count, stride in inner)))
        seen = Counter(place // node for place in sums)
        nodes, local = nodes * len(seen), max(seen.values())
    elif inner:
        count, stride = inner[0]
        nodes *= count if stride >= node else (count - 1) * stride // node + 1
        local = 1 if stride >= node else min(count, -(-node // stride))
    return Link(axis, prod(count for count, _ in dims), local, nodes)


def stage_traffic(work: Work, stage: int) -> dict[str, float]:
    """ "axis/kind" -> bytes that the first rank of a stage sends in a step."""
    layout = work.layout
    sent: defaultdict[str, float] = defaultdict(float)
    for chunk in layout.stages.on(stage):
        for unit in work.units_of(chunk):
            for message in unit.messages():
                sent[f"{message.axis}/{message.kind}"] += message.bytes * layout.micro_batches
    _add_sharding(layout, stage, sent)
    _add_pipeline(work, stage, sent)
    _add_partial(layout, stage, sent)
    return {name: sent[name] for name in sorted(sent) if sent[name]}


def _add_sharding(layout: Layout, stage: int, sent: defaultdict[str, float]) -> None:
    """Gradients and parameters over the shards, gradients over the replicas."""
    sharding, e, w = layout.config.sharding, layout.item, layout.wide
    reduce = w if w > 4 else ITEM_BYTES[sharding.grad_reduce_dtype]
    reductions = layout.micro_batches if sharding.gradient_merge_mode == "micro_batch" else 1
    full = sharding.sharding_stage == 3
    together = ("embedding", "head") if layout.tied else ()
    last = max((_number(row.unit) for row in layout.table), default=0)
    for row in layout.held(stage):
        if not row.trainable:
            continue
        prefix, shards = ("expert_" if row.expert else ""), layout.shards(row)
        whole = layout.row_numel(row) * shards
        share = (shards - 1) / shards
        item = w if row.fp32 else e
        gathers = 1
        if full:
            stays = row.unit in together if together else _number(row.unit) == last
            gathers = layout.micro_batches * (1 if stays else 2)
        sent[f"{prefix}shard/all_gather"] += whole * item * share * gathers
        sent[f"{prefix}shard/reduce_scatter"] += whole * reduce * share * reductions
        replicas = layout.replicas(row)
        sent[f"{prefix}replica/all_reduce"] += 2 * layout.row_numel(row) * reduce * (replicas - 1) / replicas


def _number(unit: str) -> int:
    return {"embedding": -1, "head": 1 << 30}.get(unit) or int(unit.removeprefix("layers."))


def _add_pipeline(work: Work, stage: int, sent: defaultdict[str, float]) -> None:
    """Activations forward, gradients backward, and a tied embedding's gradient once."""
    layout = work.layout
    pp = layout.config.grid.pp
    if pp == 1:
        return
    chunks = layout.stages.chunks
    for chunk in layout.stages.on(stage):
        if not chunk.last and chunks[chunk.index + 1].rank != stage:
            sent["pp/send"] += work.input_of(chunks[chunk.index + 1]) * layout.micro_batches
        if not chunk.first and chunks[chunk.index - 1].rank != stage:
            sent["pp/send"] += work.input_of(chunk) * layout.micro_batches
    apart = chunks[0].rank != chunks[-1].rank
    if layout.tied and apart and stage in (chunks[0].rank, chunks[-1].rank):
        word = next(row for row in layout.table if row.name == "embedding.word.weight")
        sent["pp/send"] += layout.local_numel(word) / layout.shards(word) * layout.wide


def _add_partial(layout: Layout, stage: int, sent: defaultdict[str, float]) -> None:
    """Gradients that are partial sums on every mp rank, as shards."""
    mp = layout.config.grid.mp
    if mp == 1:
        return
    partial = ("always", "sp") if layout.config.parallel.sequence_parallel else ("always",)
    rows: Sequence[ParameterSpec] = [r for r in layout.held(stage) if r.trainable and r.mp_partial in partial]
    elements = sum(layout.local_numel(row) / layout.shards(row) for row in rows)
    sent["mp/all_reduce"] += 2 * elements * layout.wide * (mp - 1) / mp
