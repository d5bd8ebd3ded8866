"""Bytes that a rank of each stage sends in one optimizer step, by group and kind of collective, and the groups' links.

Names and counts are those of a run's counters, which leave out communication that a recomputation repeats, but not the
gathers of its inputs. A few scalars per step that are summed over all ranks are not included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from megapar.core.grid import Grid
from megapar.core.pipeline.schedule import GPIPE
from megapar.core.recompute.choice import NEWEST_WHOLE
from megapar.model.cost.model_cost import CommCost
from megapar.model.parameter import names_from_first_rank
from megapar.moe.dispatch_bytes import BETWEEN, WITHIN
from megapar.planning.gathered_groups import gathered_groups
from megapar.planning.matrix_rounds import stage_rounds
from megapar.planning.planned_run import PlannedRun, input_of, units_of
from megapar.planning.timeline import TO_DEVICE, TO_HOST
from megapar.training.building.partition import ITEM_BYTES

_INNER_FIRST = ("mp", "cp", "sharding", "dp")
STAGE = "stage"  # axis of all ranks of a stage


@dataclass(frozen=True)
class Link:
    """Placement of a group on the nodes.

    Attributes:
        axis: Name of the group.
        local: Most ranks on one node.
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
    dense = {"shard": ("sharding", "cp"), "replica": ("dp",), STAGE: _INNER_FIRST}.get(axis, (axis,))
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
    """Return ``count`` places of a stage, ``step`` apart, as (number, stride) on dense axes; None if inside one."""
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

    dims: (number of multiples, stride) pairs.
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
            for message in unit.sent():
                sent[f"{message.axis}/{message.kind}"] += message.bytes * run.micro_batches
    for messages in recompute_messages(run, stage).values():
        for message in messages:
            if message.axis != HOST:
                sent[f"{message.axis}/{message.kind}"] += message.bytes * run.micro_batches
    for name, size in step_traffic(run, stage).items():
        sent[name] += size
    sent["pp/send"] += pipeline_traffic(run, stage)
    sent[f"{STAGE}/all_to_all"] += stage_rounds(run, stage).sent * ITEM_BYTES[run.matrix_dtype]
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
    rows = [(row, count, 1) for row, count in run.distinct_rows(stage) if row.trainable]
    if run.cuts_parameters:
        groups = gathered_groups(run, stage)
        again = {
            row.name: run.micro_batches * (1 if group.stays_gathered else 2) for group in groups for row in group.rows
        }
        rows = [(row, 1, again.get(row.name, 1)) for row in run.rows(stage) if row.trainable]
    for row, count, gathers in rows:
        prefix, shards = ("expert_" if row.expert and run.experts_apart else ""), run.shards(row)
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
    """Add the all-reduce over mp of sharded gradients that are partial on each mp rank, or of its first rank alone."""
    mp = run.config.grid.mp
    if mp == 1:
        return
    partial = ("always", "sp") if run.config.parallel.sequence_parallel else ("always",)
    from_first_rank = names_from_first_rank(run.table, mp, partial) if run.cuts_parameters else ()
    alike = ((row, count) for row, count in run.distinct_rows(stage) if row.trainable)
    rows = [(row, count) for row, count in alike if row.mp_partial in partial or row.name in from_first_rank]
    elements = sum(run.local_numel(row) * count / run.shards(row) for row, count in rows)
    sent["mp/all_reduce"] += 2 * elements * run.view.wide_bytes * (mp - 1) / mp


HOST = "host"  # axis of copies, whose kind is their link


def kept_share(run: PlannedRun) -> float:
    """Return the share of an input that a rank keeps: 1 / mp with ``--recompute-partition``."""
    partitions = run.config.recompute.recompute_partition and not run.view.splits_sequence
    return 1 / run.config.grid.mp if partitions else 1.0


def recompute_messages(run: PlannedRun, stage: int) -> Mapping[int, tuple[CommCost, ...]]:
    """Return the messages for the inputs of a stage's recomputed units in one micro-batch, by each unit's first layer.

    Bytes are means over the micro-batches of a step. A copy to the host (axis ``host``, kind ``to_host``) is launched
    when the unit's forward begins, and may take as long as the two following units. A copy back (``to_device``), and
    after it the all-gather over mp, is launched when the backward of the following unit begins.
    """
    offloads, share = run.config.recompute.recompute_offload, kept_share(run)
    if not offloads and share == 1.0:
        return {}
    messages: dict[int, tuple[CommCost, ...]] = {}
    for place, chunk in enumerate(run.stages.on(stage)):
        spans = [span for span in run.recompute_spans(len(chunk.layers)) if span.recomputed]
        for newer, span in enumerate(reversed(spans)):
            layer = chunk.layers[span.start]
            size = run.costs.layer(layer).input * share
            fetched = size * fetched_share(run, stage, place, newer)
            copies = []
            if offloads:
                copies = [CommCost(HOST, TO_HOST, size, "forward"), CommCost(HOST, TO_DEVICE, fetched, "backward")]
            if share < 1.0:
                copies.append(CommCost("mp", "all_gather", fetched * (run.config.grid.mp - 1), "backward"))
            messages[layer] = tuple(message for message in copies if message.bytes)
    return messages


def host_traffic(run: PlannedRun, stage: int) -> dict[str, float]:
    """Return a rank's bytes per step between host and device, by "host/kind"; offloaded state goes both ways."""
    copied: defaultdict[str, float] = defaultdict(float)
    for messages in recompute_messages(run, stage).values():
        for message in messages:
            if message.axis == HOST:
                copied[f"{HOST}/{message.kind}"] += message.bytes * run.micro_batches
    if run.config.sharding.optimizer_offload:
        wide, rows = run.view.wide_bytes, [row for row in run.rows(stage) if row.trainable]
        size = sum(run.row_numel(row) * (wide + run.state_bytes(row)) for row in rows)
        for kind in (TO_HOST, TO_DEVICE):
            copied[f"{HOST}/{kind}"] += size
    return dict(copied)


def fetched_share(run: PlannedRun, stage: int, place: int, newer: int) -> float:
    """Return the share of a stage's micro-batches in which a unit's input is no longer whole when its backward begins.

    Args:
        place: Number of the unit's chunk on the stage.
        newer: Recomputed units of the chunk that run after it.
    """
    if newer >= NEWEST_WHOLE:
        return 1.0
    entered = _entered_before_backward(run, stage)[place]
    return sum(count for after, count in entered.items() if newer + after >= NEWEST_WHOLE) / run.micro_batches


def _entered_before_backward(run: PlannedRun, stage: int) -> list[Counter[int]]:
    """Return, for each chunk of a stage, how often each number of units runs between a forward's end and backward."""
    chunks = run.stages.on(stage)
    units = [sum(span.recomputed for span in run.recompute_spans(len(chunk.layers))) for chunk in chunks]
    ends: list[list[int]] = [[] for _ in chunks]
    entered_counts: list[Counter[int]] = [Counter() for _ in chunks]
    seen, entered = [0] * len(chunks), 0
    for forward, place in _program(run, stage, len(chunks)):
        if forward:
            entered += units[place]
            ends[place].append(entered)
        else:
            entered_counts[place][entered - ends[place][seen[place]]] += 1
            seen[place] += 1
    return entered_counts


def _program(run: PlannedRun, stage: int, chunks: int) -> Iterator[tuple[bool, int]]:
    """Yield the forwards (True) and backwards of a stage in order, each with the number of its chunk on the stage.

    The orders are those of ``core/pipeline/schedule.py``, whose interleaved one needs torch. Zero bubble does not
    recompute.
    """
    pp, m = run.config.grid.pp, run.micro_batches
    total = m * chunks
    warm = pp - stage - 1
    if pp > 1 and run.schedule == GPIPE:
        warm = total
    elif chunks > 1:
        warm = 2 * warm + (chunks - 1) * pp
    warm = min(total, warm)
    for number in range(total + warm):
        if number < total:
            yield True, number // pp % chunks
        if number >= warm:
            yield False, chunks - 1 - (number - warm) // pp % chunks
