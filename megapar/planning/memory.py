"""Peak memory of a rank of each pipeline stage, in closed form.

Memory can peak at only a few moments of a step, and each is a sum:

    forward     the last forward is done: all activations, and the head's gradients on the last stage
    backward    a backward starts: activations, gradients of earlier micro-batches, temporary tensors of the backward
    reduction   the backward of the newest layer is done: the other activations, and gradients that are reduced or wait
    end         the last backward is nearly done: all gradients, and the buffers of their reduction
    gather      the optimizer is done: new parameters are gathered

Main gradients are kept in flat buffers of the master weights' dtype over all micro-batches (stage 1), or pass through
buffers of the reduction's dtype (stage 2). torch has no caching allocator on a CPU, so communication buffers are kept
for the next step (``core/comm/buffers.py``), and a reduce-scatter needs a buffer for its result.

Tested in ``tests/planning/test_plan.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.core.comm.rounds import axis_rounds, queue_rounds
from megapar.core.device.communicators import COMMUNICATORS
from megapar.core.pipeline.schedule import GPIPE, INTERLEAVED, SENDS_PER_CHUNK, ZERO_BUBBLE
from megapar.model.cost.model_cost import UnitCost
from megapar.planning.planned_run import PlannedRun, input_of, units_of
from megapar.planning.pool import buckets_of, is_cast_apart, pool_bytes
from megapar.planning.traffic import link

# In addition to tensors and communicators: the driver's context, and fragmentation of the caching allocator.
RESERVED_BYTES = round(0.75 * 2**30)
RESERVED_SHARE = 0.02


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one stage.

    Attributes:
        stage: Number of the stage.
        parameters: Parameters in the compute dtype.
        gradients: Main gradients before and after their reduction.
        optimizer: Optimizer state: master weights and moments.
        activations: Activations kept for their backward at the worst moment.
        buffers: Temporary tensors: communication buffers, gathered parameters, gradients of activations.
        peak: The highest sum of live bytes.
        groups: Buffers of communicators.
        reserved: Peak, groups, fragmentation and the driver's context.
        host: Offloaded bytes.
        moment: The moment of the peak.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int
    groups: int
    reserved: int
    host: int
    moment: str


@dataclass(frozen=True)
class _State:
    """Bytes of a stage's parameters, gradients and optimizer state.

    Attributes:
        parameters: Parameters in the compute dtype.
        optimizer: Master weights and moments on the device.
        host: Master weights and moments on the host.
        whole: Main gradients before their reduction.
        row: Main gradients after their reduction.
        scratch: Scratch buffers of the reduction.
        gathered: Gathered parameters after the optimizer's step; at stage 3 while the head runs.
        ahead: Parameters of a unit and of prefetched units during the unit's backward (stage 3).
        regathered: The same after the backward, plus the unit's gradients before and after their cast (stage 3).
        sent: Gradients of the last unit, which are live until other gradients are reduced (stage 3).
        pool: Communication buffers that a CPU keeps for the next step.
        tied: The head's gradient of a tied embedding, kept until the embedding's is added.
    """

    parameters: float
    optimizer: float
    host: float
    whole: float
    row: float
    scratch: float
    gathered: float
    ahead: float
    regathered: float
    sent: float
    pool: float
    tied: float


def stage_memory(run: PlannedRun, stage: int) -> StageMemory:
    """Return the memory of the first rank of a stage."""
    state = _state(run, stage)
    pooled = run.kind.kernels == "cpu"
    steady = state.parameters + state.optimizer
    full = run.config.sharding.sharding_stage == 3
    kept, in_flight = _kept(run, stage)
    # Gradients of earlier micro-batches are live while all activations are kept.
    later = run.micro_batches > max(in_flight)
    stage_one = run.config.sharding.gradient_merge_mode == "step"
    whole = state.pool if pooled else state.whole + state.scratch + state.row
    if pooled:
        early = whole if not full else state.pool + (state.row + state.sent if later else 0.0)
        whole += state.row if full else 0.0
    elif full:
        early = state.row + state.sent if later else 0.0
    else:
        early = (state.whole if stage_one else state.row) if later else 0.0
    waiting = _waiting(run, stage)
    moments = {
        "forward": (kept.forward, early, kept.forward_transient + (state.gathered if full else 0.0)),
        "backward": (kept.backward, early, kept.backward_transient + state.tied + state.ahead),
        "reduction": (kept.reduction, early, state.tied + state.regathered + waiting[0]),
        "end": (kept.end, whole, max(kept.end_transient, *waiting) + 2 * state.tied + state.regathered),
        "gather": (0.0, whole if pooled else state.row, 0.0 if full or pooled else state.gathered),
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    activations, gradients, buffers = moments[moment]
    peak = steady + activations + gradients + buffers
    groups = group_bytes(run, stage)
    reserved = groups + (peak if pooled else peak * (1 + RESERVED_SHARE) + RESERVED_BYTES)
    return StageMemory(
        stage=stage,
        parameters=round(state.parameters),
        gradients=round(state.whole + state.row if stage_one else state.row),
        optimizer=round(state.optimizer),
        activations=round(kept.backward),
        buffers=round(peak - steady - activations - gradients),
        peak=round(peak),
        groups=groups,
        reserved=round(reserved),
        host=round(state.host + kept.host),
        moment=moment,
    )


def _waiting(run: PlannedRun, stage: int) -> tuple[float, float]:
    """Return the bytes of gradients that wait until their bucket can copy all of them at once (stage 1).

    They are those of the largest bucket of layers, and of the first bucket, which has the embedding.
    """
    sharding = run.config.sharding
    mixed = run.config.grid.pp > 1 and run.micro_batches > 1  # a bucket has gradients of several micro-batches
    if mixed or sharding.sharding_stage == 3 or sharding.gradient_merge_mode != "step":
        return 0.0, 0.0
    if not run.kind.device_class.packs_rows:
        return 0.0, 0.0
    buckets = buckets_of(run, stage)
    sizes = [float(bucket.row * bucket.shards * bucket.item * (bucket.shards > 1)) for bucket in buckets]
    return max(sizes[1:-1] or sizes), sizes[0]


def group_bytes(run: PlannedRun, stage: int) -> int:
    """Return the bytes that the communicators of a rank of a stage keep."""
    grid, kept = run.config.grid, COMMUNICATORS[run.kind.kernels]
    if grid.world_size == 1:
        return 0
    queues = num_queues(run, stage)
    return kept.of([("world",), *axis_rounds(grid)], queues, link(grid, "ep", run.kind.node).local - 1)


def num_queues(run: PlannedRun, stage: int) -> int:
    """Return the number of pipeline queues that start or end at a stage."""
    rounds = queue_rounds(run.config.grid.pp, closed=run.stages.last_sends_to_first)
    return sum(len(group) == 2 and stage in group for groups in rounds for group in groups)


def _state(run: PlannedRun, stage: int) -> _State:
    sharding, e, w = run.config.sharding, run.view.item_bytes, run.view.wide_bytes
    reduce = run.reduce_bytes
    stage_three = sharding.sharding_stage == 3
    parameters = masters = moments = whole = row_bytes = scratch = 0.0
    units: dict[str, float] = {}
    left = False  # stage 3 treats experts that are whole on their ranks like stage 2
    for spec in run.held(stage):
        item = w if spec.fp32 else e
        local = run.local_numel(spec)
        if not spec.trainable:
            parameters += local * item
            continue
        row, shards = run.row_numel(spec), run.shards(spec)
        full = stage_three and not (spec.expert and shards == 1)
        left = left or (stage_three and not full)
        aliased = shards == 1 and item == w and not full
        parameters += row * w if full else local * item
        masters += 0.0 if aliased or full else row * w
        moments += 2 * row * w
        travels = sharding.gradient_merge_mode == "micro_batch" and shards > 1
        whole += 0.0 if full else row * shards * (reduce if travels else w)
        if full or not stage_three:
            size = row * shards * item if full else row * (shards + 1) * item * is_cast_apart(run, spec)
            units[spec.unit] = units.get(spec.unit, 0.0) + size
        if shards > 1 or full:
            row_bytes += row * w
            if reduce < w and not full and not travels:
                scratch += row * shards * reduce
    for other in _stages_held(run, stage)[1:]:
        trained = (spec for spec in run.held(other) if spec.trainable)
        parameters += sum(run.local_numel(spec) * (w if spec.fp32 else e) for spec in trained)
    pool = 0.0
    if run.kind.kernels == "cpu" and (left or not stage_three):
        pool = float(pool_bytes(run, stage, experts_only=left))
    optimizer = masters + moments
    host = optimizer if sharding.optimizer_offload else 0.0
    pending = 0.0
    chunk_ends = run.stages.on(stage)
    if run.costs.tied and any(c.first for c in chunk_ends) and any(c.last for c in chunk_ends):
        pending = e * -(-run.sizes.vocab_size // run.view.mp) * run.sizes.hidden_size
    gathered = _gathered(run, units)
    return _State(parameters, optimizer - host, host, whole, row_bytes, scratch, *gathered, pool, pending)


def _stages_held(run: PlannedRun, stage: int) -> tuple[int, ...]:
    """Return the stages whose layers a rank runs; with DualPipe also the mirrored stage, for the other direction."""
    return (stage, run.config.grid.pp - 1 - stage) if run.assumed.dualpipe else (stage,)


def _gathered(run: PlannedRun, units: dict[str, float]) -> tuple[float, float, float, float]:
    """Return ``gathered``, ``ahead``, ``regathered`` and ``sent`` of ``_State``."""
    sharding, sizes = run.config.sharding, sorted(units.values(), reverse=True)
    if sharding.sharding_stage < 3:
        return sum(sizes[: sharding.sharding_prefetch_segments + 1]), 0.0, 0.0, 0.0
    names = ("embedding", "head") if run.costs.tied else list(units)[-1:]
    stays = sum(size for name, size in units.items() if name in names)
    largest = max((size for name, size in units.items() if name not in names), default=0.0)
    ahead = stays + largest * (1 + sharding.sharding_prefetch_segments)
    cast = run.view.wide_bytes / run.view.item_bytes
    # The buffer of the last gathered unit is still allocated.
    return stays + largest, ahead, ahead + largest * (1 + cast), units.get("embedding", 0.0) * cast


@dataclass(frozen=True)
class _Kept:
    """Bytes of activations at the moments of a step, and of temporary tensors at the same moments.

    Attributes:
        forward: Activations after the last forward.
        forward_transient: Temporary tensors at that moment.
        backward: Activations when a backward starts.
        backward_transient: Temporary tensors at that moment.
        reduction: Activations after the backward of the newest layer.
        end: Activations when the last backward is nearly done.
        end_transient: Temporary tensors at that moment.
        host: Offloaded activations.
    """

    forward: float
    forward_transient: float
    backward: float
    backward_transient: float
    reduction: float
    end: float
    end_transient: float
    host: float


def _kept(run: PlannedRun, stage: int) -> tuple[_Kept, list[int]]:
    """Return (activations at all moments, micro-batches in flight of each chunk)."""
    costs = run.largest_costs
    chunks = [chunk for held in _stages_held(run, stage) for chunk in run.stages.on(held)]
    flights = in_flight(run, stage)
    host = 0.0
    total = last = first_transient = x = newest = 0.0
    forward = forward_transient = backward_transient = 0.0
    for chunk, flight in zip(chunks, flights, strict=True):
        units = units_of(costs, chunk)
        kept, offloaded, open_transient = _unit_bytes(run, units)
        total += kept * flight
        host += offloaded * flight
        newest = 0.0 if run.recompute is not None else max(unit.kept for unit in units if unit.is_layer)
        x = max(x, input_of(costs, chunk))
        received = input_of(costs, chunk) if run.config.grid.pp > 1 else 0.0
        backward_transient = max(backward_transient, open_transient + received)
        if chunk.last:
            forward_transient = costs.head.transient
            last = costs.head.kept
        if chunk.first:
            first_transient = max(first_transient, units[0].transient)
    # The runner waits for sends once this many are in flight (``core/pipeline/runner.py``).
    sends = SENDS_PER_CHUNK * len(run.stages.chunks) if stage > 0 else 0
    forward = total + x * min(sends, run.micro_batches - 1)
    backward = total + x * min(sends, run.micro_batches) - last
    end_units = units_of(costs, chunks[0])
    end = end_units[0].kept
    return (
        _Kept(forward, forward_transient, backward, backward_transient, backward - newest, end, first_transient, host),
        flights,
    )


def _unit_bytes(run: PlannedRun, units: Sequence[UnitCost]) -> tuple[float, float, float]:
    """Return one micro-batch's bytes (kept on the device, kept on the host, temporary during a unit's backward)."""
    recompute = run.config.recompute
    layers = [unit for unit in units if unit.is_layer]
    ends = sum(unit.kept for unit in units if not unit.is_layer)
    spans = [(layers[span.start : span.stop], span.recomputed) for span in run.recompute_spans(len(layers))]
    kept, host, worst = ends, 0.0, 0.0
    stored = [span for span, again in spans if again]
    for number, (span, again) in enumerate(spans):
        x = span[0].input
        inside = sum(unit.kept for unit in span)
        transient = max((unit.transient for unit in span), default=0.0) + x
        if not again:
            kept += inside
            worst = max(worst, transient)
            continue
        newest = number >= len(spans) - 2
        share = 1.0
        if recompute.recompute_partition and not run.view.splits_sequence and not newest:
            share = 1 / run.config.grid.mp
        if recompute.recompute_offload and not newest:
            host += x * share
            share = 0.0
        kept += x * share
        # All activations of the unit are live when the backward of its last operator starts.
        first = span[-1].operators[-1].transient + x
        worst = max(worst, first + inside + (x if share < 1 else 0.0))
    if len(stored) < len(spans) and stored:
        worst = max(worst, *(sum(unit.kept for unit in span) for span in stored))
    return kept, host, worst


def in_flight(run: PlannedRun, stage: int) -> list[int]:
    """Return the micro-batches in flight for each chunk of a stage, at the worst moment.

    1F1B: the number of following stages plus one (arXiv 2104.04473, 2.2). Interleaved: Megatron's warmup of
    2 (p - rank - 1) + (v - 1) p chunks plus one, distributed from the first chunk on. Zero bubble: a warmup of
    (p - rank - 1) + (v - 1) p. GPipe: all. DualPipe: those of 1F1B in each direction, for the chunks of both.
    """
    p, v, m = run.config.grid.pp, run.config.pipeline.vpp_degree, run.micro_batches
    name = run.schedule
    if p == 1:
        return [1]
    if run.assumed.dualpipe:
        return [min(m, p - stage)] * v + [min(m, stage + 1)] * v
    if name == GPIPE:
        return [m] * v
    if v == 1 and name != INTERLEAVED:
        return [min(m, p - stage)]
    if name == ZERO_BUBBLE and v == 2:  # V-shaped: at most 2 p halves
        down = min(m, 2 * p - stage)
        return [down, min(m, max(1, 2 * p - down))]
    warm = (p - stage - 1) * (1 if name == ZERO_BUBBLE else 2) + (v - 1) * p + 1
    warm = min(warm, m * v)
    flights = []
    for chunk in range(v):  # groups of p micro-batches pass the chunks in turn
        rounds, rest = divmod(warm, p * v)
        flights.append(min(m, rounds * p + min(p, max(0, rest - chunk * p))))
    return flights
