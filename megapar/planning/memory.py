"""Peak memory of a rank of each pipeline stage, in closed form.

A step has few moments at which memory can be highest, and each is a sum:

    head        everything kept, and the head makes its gradients          last stage
    layer l     kept up to l, gradients above l, and what l's backward needs
    end         nothing kept, all gradients and what their reduction needs
    publish     the optimizer is done, new parameters are gathered

Main gradients are kept in flat buffers of the master's dtype over the micro-batches (stage 1), or pass through buffers
of the dtype that is sent (stage 2). torch has no caching allocator for a CPU: communication buffers are kept for the
next step (``core/comm/buffers.py``), and a reduce-scatter needs room for what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.core.comm.rounds import axis_rounds, queue_rounds
from megapar.core.device.communicators import COMMUNICATORS
from megapar.core.pipeline.schedule import GPIPE, INTERLEAVED, SENDS_PER_CHUNK, ZERO_BUBBLE
from megapar.model.cost.model_cost import UnitCost
from megapar.planning.planned_run import PlannedRun, input_of, units_of
from megapar.planning.pool import pool_bytes
from megapar.planning.traffic import link

# Beside tensors and communicators: the driver's context, and what the caching allocator cannot use again.
RESERVED_BYTES = round(0.75 * 2**30)
RESERVED_SHARE = 0.02


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one stage.

    Attributes:
        stage: The stage.
        parameters: Parameters in the compute dtype.
        gradients: Main gradients before and after their reduction.
        optimizer: Masters and moments.
        activations: Activations that wait for their backward at the worst moment.
        buffers: Tensors of a moment: communication buffers, gathered parameters, gradients of activations.
        peak: The highest sum of live bytes.
        groups: Buffers of communicators.
        reserved: The peak with them and what the device keeps for itself.
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
    """Bytes that a stage holds for its parameters.

    Attributes:
        parameters: In the compute dtype.
        optimizer: Masters and moments on the device.
        host: Masters and moments on the host.
        whole: Main gradients before their reduction.
        row: Main gradients after it.
        scratch: Scratch of the reduction.
        gathered: Gathered parameters after the optimizer's step, or at stage 3 while the head runs.
        ahead: At stage 3 in a unit's backward: its parameters and those that are gathered ahead.
        regathered: At stage 3 after that backward, with the unit's gradients before and after their cast.
        sent: At stage 3: the last unit's gradients, which stay until others are reduced.
        pool: Buffers that a CPU keeps beside these for the next step.
        tied: The head's gradient of a tied embedding, which waits for the embedding's.
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
    """The memory of the first rank of a stage."""
    state = _state(run, stage)
    pooled = run.kind.kernels == "cpu"
    steady = state.parameters + state.optimizer
    full = run.config.sharding.sharding_stage == 3
    kept, in_flight = _kept(run, stage)
    # Gradients that are there while everything is kept: those of earlier micro-batches.
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
    moments = {
        "forward": (kept.forward, early, kept.forward_transient + (state.gathered if full else 0.0)),
        "backward": (kept.backward, early, kept.backward_transient + state.tied + state.ahead),
        "reduction": (kept.reduction, early, state.tied + state.regathered),
        "end": (kept.end, whole, kept.end_transient + 2 * state.tied + state.regathered),
        "publish": (0.0, whole if pooled else state.row, 0.0 if full or pooled else state.gathered),
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


def group_bytes(run: PlannedRun, stage: int) -> int:
    """Bytes that the communicators of a rank of a stage keep."""
    grid, kept = run.config.grid, COMMUNICATORS[run.kind.kernels]
    if grid.world_size == 1:
        return 0
    queues = num_queues(run, stage)
    return kept.of([("world",), *axis_rounds(grid)], queues, link(grid, "ep", run.kind.node).local - 1)


def num_queues(run: PlannedRun, stage: int) -> int:
    """The number of queues that a stage has an end of."""
    rounds = queue_rounds(run.config.grid.pp, closed=run.stages.goes_round)
    return sum(len(group) == 2 and stage in group for groups in rounds for group in groups)


def _state(run: PlannedRun, stage: int) -> _State:
    sharding, e, w = run.config.sharding, run.view.item_bytes, run.view.wide_bytes
    reduce = run.reduce_bytes
    stage_three = sharding.sharding_stage == 3
    parameters = masters = moments = whole = row_bytes = scratch = 0.0
    units: dict[str, float] = {}
    left = False  # experts that are whole on their ranks, which stage 3 leaves to stage 2
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
            size = row * shards * item if full else row * (shards + 1) * item
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
    """Stages whose layers a rank runs: in DualPipe also the one at the other end, for the other direction."""
    return (stage, run.config.grid.pp - 1 - stage) if run.assumed.dualpipe else (stage,)


def _gathered(run: PlannedRun, units: dict[str, float]) -> tuple[float, float, float, float]:
    """(published, or at stage 3 while the head runs; at stage 3: ahead, regathered, sent of ``_State``)."""
    sharding, sizes = run.config.sharding, sorted(units.values(), reverse=True)
    if sharding.sharding_stage < 3:
        return sum(sizes[: sharding.sharding_prefetch_segments + 1]), 0.0, 0.0, 0.0
    names = ("embedding", "head") if run.costs.tied else list(units)[-1:]
    stays = sum(size for name, size in units.items() if name in names)
    largest = max((size for name, size in units.items() if name not in names), default=0.0)
    ahead = stays + largest * (1 + sharding.sharding_prefetch_segments)
    cast = run.view.wide_bytes / run.view.item_bytes
    # The last unit that was gathered leaves its buffer.
    return stays + largest, ahead, ahead + largest * (1 + cast), units.get("embedding", 0.0) * cast


@dataclass(frozen=True)
class _Kept:
    """Bytes of activations at the moments of a step, and what lives beside them then.

    Attributes:
        forward: When the last forward is done.
        forward_transient: Beside that.
        backward: When a backward begins.
        backward_transient: Beside that.
        reduction: When the backward of the newest layer is done.
        end: When the last backward is nearly done.
        end_transient: Beside that.
        host: Offloaded.
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
    """(Activations at all moments, the micro-batches in flight of each chunk)."""
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
    # Sent messages are waited for when so many wait (``core/pipeline/runner.py``).
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
    """(kept on the device, kept on the host, needed beside it while a unit's backward runs) of one micro-batch."""
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
        # Everything inside is there when the backward of the last operator begins.
        first = span[-1].operators[-1].transient + x
        worst = max(worst, first + inside + (x if share < 1 else 0.0))
    if len(stored) < len(spans) and stored:
        worst = max(worst, *(sum(unit.kept for unit in span) for span in stored))
    return kept, host, worst


def in_flight(run: PlannedRun, stage: int) -> list[int]:
    """Micro-batches that wait for their backward at once, of every chunk of a stage, at the worst moment.

    1F1B: as many as stages follow, and one (arXiv 2104.04473, 2.2). Interleaved: Megatron's warm-up of
    2 (p - rank - 1) + (v - 1) p chunks and one, shared out from the first chunk on; zero-bubble warms up with
    (p - rank - 1) + (v - 1) p. GPipe keeps all. DualPipe: those of 1F1B in either direction, for the chunks of both.
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
    for chunk in range(v):  # groups of p micro-batches go through chunk after chunk
        rounds, rest = divmod(warm, p * v)
        flights.append(min(m, rounds * p + min(p, max(0, rest - chunk * p))))
    return flights
