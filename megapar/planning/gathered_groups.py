"""Groups of parameters that a stage gathers and reduces together: the run's segments, with what is wrapped apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megapar.core.sharding.bucket_plan import PlannedBucket
from megapar.model.parameter import ParameterSpec
from megapar.planning.planned_run import PlannedRun
from megapar.training.building.partition import make_segments


@dataclass(frozen=True)
class GatheredGroup:
    """Parameters that are gathered and reduced together.

    Attributes:
        rows: Their rows of the table, in forward order.
        sizes: Bytes of the whole parameters, in the dtype of computations, by unit.
        stays: Not freed between forward and backward (stage 3).
        apart: Wrapped apart from its unit, and never gathered ahead (stage 3).
    """

    rows: tuple[ParameterSpec, ...]
    sizes: Mapping[str, float]
    stays: bool = False
    apart: bool = False

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
    key = (
        "segments",
        run.sizes,
        run.config.training.dtype,
        size,
        whole,
        sharding.sharding_stage,
        grid.mp,
        grid.ep,
        grid.emp,
    )
    return run.shared.get(key, lambda: make_segments(run.config, run.sizes, run.table))


def _make_groups(run: PlannedRun, stage: int) -> list[GatheredGroup]:
    # Stage 3 treats experts that are whole on their ranks like stage 2.
    whole = run.cuts_parameters and run.config.grid.expert_shards == 1
    held = {row.name: row for row in run.held(stage) if row.trainable and not (whole and row.expert)}
    plan = segments_of(run)
    buckets = [[held[name] for name in planned.names if name in held] for planned in plan]
    if not run.cuts_parameters:
        return [_group(run, rows) for rows in buckets if rows]
    modules: dict[str, list[ParameterSpec]] = {}  # those that are wrapped apart; "" for the others
    grid = run.config.grid
    experts = any(row.expert for row in held.values())
    apart = experts and grid.shard_group(0, expert=True) != grid.shard_group(0, expert=False)
    mixed = run.view.item_bytes != run.view.wide_bytes
    for row in held.values():
        alone = (row.expert and apart) or (row.fp32 and mixed)
        modules.setdefault(row.name.rpartition(".")[0] if alone else "", []).append(row)
    tied = ("embedding", "head") if run.costs.tied else ()
    joint = [row for rows in buckets if any(row.unit in tied for row in rows) for row in rows]
    others = [rows for rows in buckets if not any(row.unit in tied for row in rows)]
    own = {row.name for row in modules.pop("", [])}
    inner = [kept for rows in (joint, *others) if (kept := [row for row in rows if row.name in own])]
    last = 0 if tied else len(inner) - 1  # the group that the forward uses last
    groups = [_group(run, rows, stays=number == last) for number, rows in enumerate(inner)]
    return [*groups, *(_group(run, rows, apart=True) for rows in modules.values())]


def _group(
    run: PlannedRun, rows: Sequence[ParameterSpec], *, stays: bool = False, apart: bool = False
) -> GatheredGroup:
    sizes: dict[str, float] = {}
    for row in rows:
        size = run.row_numel(row) * run.shards(row) * (run.view.wide_bytes if row.fp32 else run.view.item_bytes)
        sizes[row.unit] = sizes.get(row.unit, 0.0) + size
    return GatheredGroup(tuple(rows), sizes, stays, apart)


@dataclass(frozen=True)
class Unsharded:
    """Bytes of whole parameters and of their gradients in a backward of stage 3, with its newest layers done first.

    Attributes:
        forward: Parameters when the last forward is done.
        opened: Most bytes when a unit's backward starts, less the activations that are free by then.
        closed: Most bytes when a unit's backward is done, likewise.
        oldest: Bytes when the backward of the oldest layer starts.
        end: Most bytes when the last units' backward is done.
        sent: The gradients that are reduced last.
    """

    forward: float = 0.0
    opened: float = 0.0
    closed: float = 0.0
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
    for unit, there, after in moments:
        opened.append(there - done * newest)
        done += unit.startswith("layers.")
        closed.append(after - done * newest)
    inner = [group for group in groups if not group.apart]
    # The buffer of what the forward gathered last is still allocated.
    last = next((group for group in groups[::-1] if group.apart and {*group.sizes} <= {*inner[-1].sizes}), inner[-1])
    oldest = max((place for place, (unit, *_) in enumerate(moments) if unit.startswith("layers.")), default=0)
    return Unsharded(
        forward=last.bytes + sum(group.bytes for group in inner if group.stays),
        opened=max(opened),
        closed=max(closed) + newest,
        oldest=moments[oldest][1],
        end=max(after for *_, after in moments[oldest:]),
        sent=inner[0].bytes * run.view.wide_bytes / run.view.item_bytes,
    )


def _moments(run: PlannedRun, groups: Sequence[GatheredGroup], tied: float) -> Iterator[tuple[str, float, float]]:
    """Yield (unit, bytes when its backward starts, most bytes until it is done), newest unit first.

    A group is there from its newest unit to its oldest, and so are its gradients. Then these are copied to a message,
    which is kept until the next group's gradients are.
    """
    cast = run.view.wide_bytes / run.view.item_bytes
    depth = run.config.sharding.sharding_prefetch_segments or 1  # FSDP2 gathers one ahead by itself
    order = {unit: place for place, unit in enumerate(dict.fromkeys(row.unit for row in run.held(0) if row.trainable))}
    spans = [(min(places), max(places)) for places in ([order[unit] for unit in group.sizes] for group in groups)]
    made = [tied * ("embedding" in group.sizes) for group in groups]
    message = 0.0
    for unit, place in reversed(order.items()):
        there = [number for number, (first, last) in enumerate(spans) if first <= place <= last]
        stay = [number for number, group in enumerate(groups) if group.stays and spans[number][0] <= place]
        older = [number for number, group in enumerate(groups) if spans[number][1] < place and not group.apart]
        ahead = sorted({*older} - {*stay}, key=lambda number: -spans[number][1])[:depth]
        live = sum(groups[number].bytes for number in {*there, *stay, *ahead})
        start = live + sum(made) + message
        for number in there:
            made[number] += groups[number].sizes.get(unit, 0.0)
        most = live + sum(made)
        for number in (number for number in there if spans[number][0] == place):
            made[number] -= tied * ("embedding" in groups[number].sizes)
            message = made[number] * cast
            most = max(most, live + sum(made) + message)
            made[number] = 0.0
        yield unit, start, most
