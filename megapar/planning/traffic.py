"""Bytes that a rank of each stage sends in one optimizer step, by group and kind of collective, and the groups' links.

Names and counts are those of a run's counters, which leave out communication that a recomputation repeats, but not the
gathers of its inputs. A few scalars per step that are summed over all ranks are not included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from megapar.core.grid import Grid
from megapar.model.parameter import led_names
from megapar.moe.dispatch_bytes import BETWEEN, WITHIN
from megapar.planning.gathered_groups import gathered_groups
from megapar.planning.kept_inputs import HOST, recompute_messages
from megapar.planning.planned_run import PlannedRun, input_of, units_of

_INNER_FIRST = ("mp", "cp", "sharding", "dp")


@dataclass(frozen=True)
class Link:
    """Placement of a group on the nodes.

    Attributes:
        axis: Name of the group.
        ranks: Number of ranks.
        local: Most ranks on one node.
        nodes: Number of nodes.
    """

    axis: str
    ranks: int
    local: int
    nodes: int

    def outside(self, kind: str) -> float:
        """Return the share of a rank's bytes that leaves its node."""
        if self.nodes <= 1:
            return 0.0
        if kind == "all_to_all":
            return (self.ranks - self.local) / max(1, self.ranks - 1)
        return 1.0 if kind == "send" else 1.0 / self.local  # in a ring, one rank of each node sends to another node


def link(grid: Grid, axis: str, node: int) -> Link:
    """Return the placement of rank 0's group along an axis, named as in ``CommBytes``, on nodes of ``node`` ranks.

    If the ranks of the group form a grid, the time does not depend on the world size.
    """
    if axis == "world":
        return _link_over(axis, [(grid.world_size, 1)], node)
    dense = {"shard": ("sharding", "cp"), "replica": ("dp",)}.get(axis, (axis,))
    if set(dense) <= set(grid.order):
        return _link_over(axis, [(grid.size(name), _stride(grid, name)) for name in dense], node)
    if axis in (BETWEEN, WITHIN):
        local = grid.ep_node_ranks(node) or 1
        return Link(axis, local, local, 1) if axis == WITHIN else Link(axis, grid.ep // local, 1, grid.ep // local)
    shards, inner = grid.expert_shards, grid.ep * grid.emp
    # Step between the group's ranks in the expert view of a stage, and number of ranks.
    step, count = {
        "emp": (1, grid.emp),
        "ep": (grid.emp, grid.ep),
        "edp": (inner, grid.edp),
        "expert_shard": (inner, shards),
        "expert_replica": (inner * shards, -(-grid.edp // shards)),
    }[axis]
    dims = _dense_dims(grid, step, count)
    if dims is not None:
        return _link_over(axis, dims, node)
    nodes = Counter(_rank(grid, place * step) // node for place in range(count))
    return Link(axis, count, max(nodes.values()), len(nodes))


def _stride(grid: Grid, axis: str) -> int:
    return prod(grid.size(name) for name in grid.order[grid.order.index(axis) + 1 :])


def _rank(grid: Grid, place: int) -> int:
    """Return the rank at a place of the first stage in the expert view."""
    dense = {}
    for axis in _INNER_FIRST:
        place, dense[axis] = divmod(place, grid.size(axis))
    return grid.rank(**dense)


def _dense_dims(grid: Grid, step: int, count: int) -> list[tuple[int, int]] | None:
    """Return ``count`` places of a stage, ``step`` apart, as (number, stride) on the dense axes.

    Returns None if they end inside an axis.
    """
    dims, weight = [], 1
    for axis in _INNER_FIRST:
        size = grid.size(axis)
        if count > 1 and step < weight * size:
            on_axis = min(count, weight * size // step)
            if (
                count % on_axis
                or (weight * size) % step
                or step % weight
                or (on_axis < count and on_axis * step != weight * size)
            ):
                return None
            dims.append((on_axis, step // weight * _stride(grid, axis)))
            count, step = count // on_axis, step * on_axis
        weight *= size
    return dims


def _link_over(axis: str, dims: Sequence[tuple[int, int]], node: int) -> Link:
    """Return the placement of a group whose ranks are the sums of one multiple of each stride.

    Strides divide each other like the digits of a number: each step of a stride that is a multiple of ``node`` leads to
    another node, and the sums of the smaller strides stay between two such steps.

    Args:
        axis: Name of the group.
        dims: (number of multiples, stride) pairs.
        node: Ranks per node.
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


def stage_traffic(run: PlannedRun, stage: int) -> dict[str, float]:
    """Return the bytes that the first rank of a stage sends in a step, by "axis/kind"."""
    sent: defaultdict[str, float] = defaultdict(float)
    for chunk in run.stages.on(stage):
        for unit in units_of(run.costs, chunk):
            for one in unit.sent():
                sent[f"{one.axis}/{one.kind}"] += one.bytes * run.micro_batches
    for messages in recompute_messages(run, stage).values():
        for one in messages:
            if one.axis != HOST:
                sent[f"{one.axis}/{one.kind}"] += one.bytes * run.micro_batches
    for name, size in step_traffic(run, stage).items():
        sent[name] += size
    sent["pp/send"] += pipeline_traffic(run, stage)
    return {name: sent[name] for name in sorted(sent) if sent[name]}


def step_traffic(run: PlannedRun, stage: int) -> dict[str, float]:
    """Return the bytes of parameters and of their gradients that the first rank of a stage sends in a step."""
    sent: defaultdict[str, float] = defaultdict(float)
    _add_sharding(run, stage, sent)
    _add_partial(run, stage, sent)
    chunks = run.stages.chunks
    if run.costs.tied and chunks[0].rank != chunks[-1].rank and stage in (chunks[0].rank, chunks[-1].rank):
        word = next(row for row in run.table if row.name == "embedding.word.weight")
        sent["pp/send"] += run.local_numel(word) / run.shards(word) * run.view.wide_bytes
    return sent


def _add_sharding(run: PlannedRun, stage: int, sent: defaultdict[str, float]) -> None:
    """Add the reduce-scatters and all-gathers over shards, and the all-reduces over replicas."""
    sharding, e, w = run.config.sharding, run.view.item_bytes, run.view.wide_bytes
    reduce = run.reduce_bytes
    reductions = run.micro_batches if sharding.gradient_merge_mode == "micro_batch" else 1
    full = sharding.sharding_stage == 3
    joint = full and run.config.grid.shard_group(0, expert=True) == run.config.grid.shard_group(0, expert=False)
    rows = [(row, count, 1) for row, count in run.alike(stage) if row.trainable]
    if run.cuts_parameters:
        groups = gathered_groups(run, stage)
        again = {row.name: run.micro_batches * (1 if group.stays else 2) for group in groups for row in group.rows}
        rows = [(row, 1, again.get(row.name, 1)) for row in run.held(stage) if row.trainable]
    for row, count, gathers in rows:
        prefix, shards = ("expert_" if row.expert and not joint else ""), run.shards(row)
        elements = run.row_numel(row) * count
        whole = elements * shards
        share = (shards - 1) / shards
        sent[f"{prefix}shard/all_gather"] += whole * (w if row.fp32 else e) * share * gathers
        sent[f"{prefix}shard/reduce_scatter"] += whole * reduce * share * reductions
        replicas = run.replicas(row)
        sent[f"{prefix}replica/all_reduce"] += 2 * elements * reduce * (replicas - 1) / replicas


def pipeline_traffic(run: PlannedRun, stage: int) -> float:
    """Return the bytes of activations and of their gradients that a rank of a stage sends to others in a step."""
    sent, chunks = 0.0, run.stages.chunks
    for chunk in run.stages.on(stage):
        if not chunk.last and chunks[chunk.index + 1].rank != stage:
            sent += input_of(run.costs, chunks[chunk.index + 1]) * run.micro_batches
        if not chunk.first and chunks[chunk.index - 1].rank != stage:
            sent += input_of(run.costs, chunk) * run.micro_batches
    return sent


def _add_partial(run: PlannedRun, stage: int, sent: defaultdict[str, float]) -> None:
    """Add the all-reduce over mp of gradients that are partial sums on each mp rank, or led by one; already sharded."""
    mp = run.config.grid.mp
    if mp == 1:
        return
    partial = ("always", "sp") if run.config.parallel.sequence_parallel else ("always",)
    led = led_names(run.table, mp, partial) if run.cuts_parameters else ()
    alike = ((row, count) for row, count in run.alike(stage) if row.trainable)
    rows = [(row, count) for row, count in alike if row.mp_partial in partial or row.name in led]
    elements = sum(run.local_numel(row) * count / run.shards(row) for row, count in rows)
    sent["mp/all_reduce"] += 2 * elements * run.view.wide_bytes * (mp - 1) / mp
