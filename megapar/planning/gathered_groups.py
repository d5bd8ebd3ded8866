"""Groups of parameters that a stage gathers and reduces together: the run's segments, with what is wrapped apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megapar.core.sharding.bucket_plan import PlannedBucket
from megapar.core.sharding.cut import keeps_aligned
from megapar.model.parameter import ParameterSpec
from megapar.planning.planned_run import PlannedRun
from megapar.training.building.partition import make_segments


@dataclass(frozen=True)
class GatheredGroup:
    """Parameters that are gathered and reduced together.

    Attributes:
        rows: Their rows of the table, in forward order.
        sizes: Bytes of the whole parameters, in the dtype of computations, by unit.
        stays_gathered: Not freed between forward and backward (stage 3).
        wrapped_apart: Wrapped apart from its unit, and never gathered ahead (stage 3).
    """

    rows: tuple[ParameterSpec, ...]
    sizes: Mapping[str, float]
    stays_gathered: bool = False
    wrapped_apart: bool = False

    @property
    def bytes(self) -> float:
        """Bytes of the whole parameters."""
        return sum(self.sizes.values())


def gathered_groups(run: PlannedRun, stage: int) -> Sequence[GatheredGroup]:
    """Return the groups of a stage, in forward order; at stage 3 as FSDP2 is given them (``core/sharding/fsdp.py``)."""
    config = run.config
    fixed = config.parallel, config.sharding, config.grid, config.ampipe.ampipe_tp_sp_comm_overlap
    key = "groups", stage, run.sizes, run.stages, run.dtype, fixed
    return run.shared.get(key, lambda: _make_groups(run, stage))


def segments_of(run: PlannedRun) -> Sequence[PlannedBucket]:
    """Return the run's segments, which are the same for all stages, schedules and numbers of micro-batches."""
    grid, sharding = run.config.grid, run.config.sharding
    size = sharding.sharding_segment_strategy, sharding.segment_broadcast_mb, sharding.segment_anchors
    whole = sharding.sharding_stage == 3 and run.config.ampipe.ampipe_tp_sp_comm_overlap
    layout = sharding.sharding_stage, grid.mp, grid.ep, grid.emp
    key = "segments", run.sizes, run.config.training.dtype, size, whole, layout
    return run.shared.get(key, lambda: make_segments(run.config, run.sizes, run.table))


@dataclass(frozen=True)
class StageBucket:
    """Parameters of one dtype and one pair of axes in a segment of a stage, as stages 1 and 2 reduce them together.

    Attributes:
        shard_numel: Elements of one shard.
        item_bytes: Bytes of an element of its parameters.
        main_bytes: Bytes of an element of its main gradient.
        replicated: It has replicas over dp (hybrid sharding).
        cast: The master weights are cast into a buffer, which is gathered or copied to the parameters.
    """

    shard_numel: int
    shards: int
    item_bytes: int
    main_bytes: int
    replicated: bool
    cast: bool

    @property
    def numel(self) -> int:
        """Elements of all shards."""
        return self.shard_numel * self.shards


def buckets_of(run: PlannedRun, stage: int, *, experts_only: bool = False) -> list[StageBucket]:
    """Return the buckets of a stage in forward order. experts_only: those that stage 3 treats like stage 2."""
    place = {name: number for number, planned in enumerate(segments_of(run)) for name in planned.names}
    rows: dict[tuple[int, bool, bool], list[ParameterSpec]] = {}
    for row in sorted(run.rows(stage), key=lambda row: place.get(row.name, 0)):
        if row.trainable and (row.expert or not experts_only):
            rows.setdefault((place[row.name], row.fp32, row.expert and run.experts_apart), []).append(row)
    return [_bucket(run, members) for members in rows.values()]


def _bucket(run: PlannedRun, rows: Sequence[ParameterSpec]) -> StageBucket:
    first, wide = rows[0], run.view.wide_bytes
    item, shards = (wide if first.fp32 else run.view.item_bytes), run.shards(first)
    # Where one rank keeps all master weights, parameters are cast where they lie, unless one leaves the next unaligned.
    odd = item != wide and not all(keeps_aligned(run.local_numel(row), item) for row in rows)
    numel = sum(run.row_numel(row) for row in rows)
    return StageBucket(numel, shards, item, run.main_bytes(first), run.replicas(first) > 1, shards > 1 or odd)


def _make_groups(run: PlannedRun, stage: int) -> list[GatheredGroup]:
    # Stage 3 treats experts that are whole on their ranks like stage 2.
    whole = run.cuts_parameters and run.config.grid.expert_shards == 1
    named = {row.name: row for row in run.rows(stage) if row.trainable and not (whole and row.expert)}
    plan = segments_of(run)
    buckets = [[named[name] for name in planned.names if name in named] for planned in plan]
    if not run.cuts_parameters:
        return [_group(run, rows) for rows in buckets if rows]
    modules: dict[str, list[ParameterSpec]] = {}  # those that are wrapped apart; "" for the others
    grid = run.config.grid
    experts = any(row.expert for row in named.values())
    own_ranks = experts and grid.shard_group(0, expert=True) != grid.shard_group(0, expert=False)
    mixed = run.view.item_bytes != run.view.wide_bytes
    for row in named.values():
        wrapped_apart = (row.expert and own_ranks) or (row.fp32 and mixed)
        modules.setdefault(row.name.rpartition(".")[0] if wrapped_apart else "", []).append(row)
    tied = ("embedding", "head") if run.costs.tied else ()
    joint = [row for rows in buckets if any(row.unit in tied for row in rows) for row in rows]
    others = [rows for rows in buckets if not any(row.unit in tied for row in rows)]
    remaining = {row.name for row in modules.pop("", [])}
    inner = [kept for rows in (joint, *others) if (kept := [row for row in rows if row.name in remaining])]
    last = 0 if tied else len(inner) - 1  # the group that the forward uses last
    groups = [_group(run, rows, stays_gathered=number == last) for number, rows in enumerate(inner)]
    return [*groups, *(_group(run, rows, wrapped_apart=True) for rows in modules.values())]


def _group(
    run: PlannedRun, rows: Sequence[ParameterSpec], *, stays_gathered: bool = False, wrapped_apart: bool = False
) -> GatheredGroup:
    sizes: dict[str, float] = {}
    for row in rows:
        size = run.row_numel(row) * run.shards(row) * (run.view.wide_bytes if row.fp32 else run.view.item_bytes)
        sizes[row.unit] = sizes.get(row.unit, 0.0) + size
    return GatheredGroup(tuple(rows), sizes, stays_gathered, wrapped_apart)


@dataclass(frozen=True)
class Unsharded:
    """Bytes of whole parameters and of their gradients in a backward of stage 3, with its newest layers done first.

    Attributes:
        forward: Parameters when the last forward is done.
        opened: Most bytes when a unit's backward starts, less the activations that are free by then.
        opened_shards: Shards of gradients besides those.
        closed: Most bytes when a unit's backward is done, likewise.
        closed_shards: Shards of gradients besides those.
        oldest: Bytes when the backward of the oldest layer starts.
        end: Most bytes when the last units' backward is done.
        sent: The gradients that are reduced last.
    """

    forward: float = 0.0
    opened: float = 0.0
    opened_shards: float = 0.0
    closed: float = 0.0
    closed_shards: float = 0.0
    oldest: float = 0.0
    end: float = 0.0
    sent: float = 0.0


def unsharded(run: PlannedRun, stage: int, newest: float, tied: float) -> Unsharded:
    """Return what stage 3 has unsharded.

    Args:
        newest: Activations that the backward of one layer frees.
        tied: The head's gradient of a tied embedding, which the backward makes first.
    """
    groups = gathered_groups(run, stage)
    moments = list(_moments(run, groups, tied))
    done, opened, closed = 0, [], []
    for unit, start, most, reduced in moments:
        # With more micro-batches those of earlier ones are there in any case.
        shards = reduced if run.micro_batches == 1 else 0.0
        opened.append((start - done * newest, shards))
        done += unit.startswith("layers.")
        closed.append((most - done * newest, shards))
    (most_opened, opened_shards), (most_closed, closed_shards) = (max(each, key=sum) for each in (opened, closed))
    inner = [group for group in groups if not group.wrapped_apart]
    # The buffer of what the forward gathered last is still allocated.
    within = [group for group in groups if group.wrapped_apart and {*group.sizes} <= {*inner[-1].sizes}]
    last = within[-1] if within else inner[-1]
    oldest = max((place for place, (unit, *_) in enumerate(moments) if unit.startswith("layers.")), default=0)
    return Unsharded(
        forward=last.bytes + sum(group.bytes for group in inner if group.stays_gathered),
        opened=most_opened,
        opened_shards=opened_shards,
        closed=most_closed + newest,
        closed_shards=closed_shards,
        oldest=moments[oldest][1],
        end=max(most for _, _, most, _ in moments[oldest:]),
        sent=inner[0].bytes * run.view.wide_bytes / run.view.item_bytes,
    )


def _moments(
    run: PlannedRun, groups: Sequence[GatheredGroup], tied: float
) -> Iterator[tuple[str, float, float, float]]:
    """Yield (unit, bytes when its backward starts, most bytes until it is done, gradient shards), newest unit first.

    A group is gathered from its newest unit to its oldest, and so are its gradients. Then these are copied to a
    message, which is kept until the next group's message is made. On a CPU the pieces of other ranks arrive in a buffer
    of that size (``core/comm/collectives.py``).
    """
    cast, on_cpu = run.view.wide_bytes / run.view.item_bytes, run.kind.kernels == "cpu"
    depth = run.config.sharding.sharding_prefetch_segments or 1  # FSDP2 gathers one ahead by itself
    order = {unit: place for place, unit in enumerate(dict.fromkeys(row.unit for row in run.rows(0) if row.trainable))}
    spans = [(min(places), max(places)) for places in ([order[unit] for unit in group.sizes] for group in groups)]
    made = [tied * ("embedding" in group.sizes) for group in groups]
    message = reduced = 0.0
    for unit, place in reversed(order.items()):
        there = [number for number, (first, last) in enumerate(spans) if first <= place <= last]
        stay = [number for number, group in enumerate(groups) if group.stays_gathered and spans[number][0] <= place]
        older = [number for number, group in enumerate(groups) if spans[number][1] < place and not group.wrapped_apart]
        ahead = sorted({*older} - {*stay}, key=lambda number: -spans[number][1])[:depth]
        live = sum(groups[number].bytes for number in {*there, *stay, *ahead})
        start, before = live + sum(made) + message, reduced
        for number in there:
            made[number] += groups[number].sizes.get(unit, 0.0)
        most = live + sum(made) + message
        for number in (number for number in there if spans[number][0] == place):
            made[number] -= tied * ("embedding" in groups[number].sizes)
            message = made[number] * cast
            shard = message / run.shards(groups[number].rows[0])
            most = max(most, live + sum(made) + message)
            made[number] = 0.0
            if on_cpu:
                most = max(most, live - groups[number].bytes + sum(made) + 2 * message + shard)
            reduced += shard
        yield unit, start, most, before
