"""Peak memory of a rank of every pipeline stage, in closed form.

A step has few moments at which memory can be highest, and each is a sum:

    head        everything kept, and the head makes its gradients          last stage
    layer l     kept up to l, gradients above l, and what l's backward needs
    end         nothing kept, all gradients and what their reduction needs
    publish     the optimizer is done, new parameters are gathered

Main gradients lie in flat buffers of the master's dtype over the micro-batches (stage 1), or pass through buffers of
the dtype that travels (stage 2). A CPU has no caching allocator of torch's: buffers that travel are kept for the next
step (``core/buffers.py``), and a reduce-scatter needs room for what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapar.core.device.communicators import COMMUNICATORS
from megapar.core.pipeline.schedule import GPIPE, INTERLEAVED, SENDS_PER_CHUNK, ZERO_BUBBLE
from megapar.core.rounds import axis_rounds, queue_rounds
from megapar.planning.layout import Layout
from megapar.planning.parts import Unit
from megapar.planning.pool import pool_bytes
from megapar.planning.traffic import link
from megapar.planning.work import Work
from megapar.training.segments import ITEM_BYTES

# Beside tensors and communicators: the driver's context, and what the caching allocator cannot use again.
RESERVED_BYTES = round(0.75 * 2**30)
RESERVED_SHARE = 0.02


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one stage. activations: what backward passes wait for at the worst moment. buffers: what lives
    for a moment: messages, gathered parameters, gradients of activations. peak: the highest sum of live bytes.
    groups: what communicators keep. reserved: peak with them and what the device keeps for itself. moment: when the
    peak is. host: what was offloaded."""

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
    """What a stage holds of its parameters, in bytes."""

    parameters: float
    optimizer: float
    host: float
    whole: float  # main gradients before their reduction
    row: float  # after it
    scratch: float  # of the reduction
    gathered: float  # while parameters are published, or at stage 3 while the head runs
    ahead: float  # at stage 3 in a unit's backward: its parameters and those that are gathered ahead
    regathered: float  # at stage 3 behind it, with its gradients before and after their cast
    sent: float  # at stage 3: the last unit's gradients, which stay until others are reduced
    pool: float  # buffers that a CPU keeps beside these for the next step
    tied: float  # the head's gradient of a tied embedding, which waits for the embedding's


def stage_memory(work: Work, stage: int) -> StageMemory:
    """Of the first rank of a stage."""
    layout = work.layout
    state = _state(layout, stage)
    pooled = layout.kind.kernels == "cpu"
    steady = state.parameters + state.optimizer
    full = layout.config.sharding.sharding_stage == 3
    kept, in_flight = _kept(work, stage)
    # Gradients that are there while everything is kept: those of earlier micro-batches.
    later = layout.micro_batches > max(in_flight)
    stage_one = layout.config.sharding.gradient_merge_mode == "step"
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
    groups = group_bytes(layout, stage)
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


def group_bytes(layout: Layout, stage: int) -> int:
    """What the communicators of a rank of a stage keep."""
    grid, kept = layout.config.grid, COMMUNICATORS[layout.kind.kernels]
    if grid.world_size == 1:
        return 0
    queues = num_queues(layout, stage)
    return kept.of([("world",), *axis_rounds(grid)], queues, link(grid, "ep", layout.kind.node).local - 1)


def num_queues(layout: Layout, stage: int) -> int:
    """Queues that a stage has an end of."""
    rounds = queue_rounds(layout.config.grid.pp, closed=layout.stages.goes_round)
    return sum(len(group) == 2 and stage in group for groups in rounds for group in groups)


def _state(layout: Layout, stage: int) -> _State:
    sharding, e, w = layout.config.sharding, layout.item, layout.wide
    reduce = min(w, ITEM_BYTES[sharding.grad_reduce_dtype]) if w == 4 else w
    stage_three = sharding.sharding_stage == 3
    parameters = masters = moments = whole = row_bytes = scratch = 0.0
    units: dict[str, float] = {}
    left = False  # experts that are whole on their ranks, which stage 3 leaves to stage 2
    for spec in layout.held(stage):
        item = w if spec.fp32 else e
        local = layout.local_numel(spec)
        if not spec.trainable:
            parameters += local * item
            continue
        row, shards = layout.row_numel(spec), layout.shards(spec)
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
    for other in _stages_held(layout, stage)[1:]:
        trained = (spec for spec in layout.held(other) if spec.trainable)
        parameters += sum(layout.local_numel(spec) * (w if spec.fp32 else e) for spec in trained)
    pool = 0.0
    if layout.kind.kernels == "cpu" and (left or not stage_three):
        pool = float(pool_bytes(layout, stage, experts_only=left))
    optimizer = masters + moments
    host = optimizer if sharding.optimizer_offload else 0.0
    pending = 0.0
    chunk_ends = layout.stages.on(stage)
    if layout.tied and any(c.first for c in chunk_ends) and any(c.last for c in chunk_ends):
        pending = e * layout.vocabulary * layout.sizes.hidden_size
    gathered = _gathered(layout, units)
    return _State(parameters, optimizer - host, host, whole, row_bytes, scratch, *gathered, pool, pending)


def _stages_held(layout: Layout, stage: int) -> tuple[int, ...]:
    """Stages whose layers a rank runs: in DualPipe its own, and in the other direction the one at the other end."""
    return (stage, layout.config.grid.pp - 1 - stage) if layout.assumed.dualpipe else (stage,)


def _gathered(layout: Layout, units: dict[str, float]) -> tuple[float, float, float, float]:
    """(published, or at stage 3 while the head runs; at stage 3: ahead, regathered, sent of ``_State``)."""
    sharding, sizes = layout.config.sharding, sorted(units.values(), reverse=True)
    if sharding.sharding_stage < 3:
        return sum(sizes[: sharding.sharding_prefetch_segments + 1]), 0.0, 0.0, 0.0
    names = ("embedding", "head") if layout.tied else list(units)[-1:]
    stays = sum(size for name, size in units.items() if name in names)
    largest = max((size for name, size in units.items() if name not in names), default=0.0)
    ahead = stays + largest * (1 + sharding.sharding_prefetch_segments)
    cast = layout.wide / layout.item
    # The last unit that was gathered leaves its buffer.
    return stays + largest, ahead, ahead + largest * (1 + cast), units.get("embedding", 0.0) * cast


@dataclass(frozen=True)
class _Kept:
    """Bytes of activations at the moments, and what lives beside them then."""

    forward: float
    forward_transient: float
    backward: float
    backward_transient: float
    reduction: float  # when the newest layer's backward is done
    end: float
    end_transient: float
    host: float


def _kept(work: Work, stage: int) -> tuple[_Kept, list[int]]:
    """At every moment; and the micro-batches in flight of each chunk."""
    layout = work.layout
    chunks = [chunk for held in _stages_held(layout, stage) for chunk in layout.stages.on(held)]
    flights = in_flight(layout, stage)
    host = 0.0
    total = last = first_transient = x = newest = 0.0
    forward = forward_transient = backward_transient = 0.0
    for chunk, flight in zip(chunks, flights, strict=True):
        units = work.units_of(chunk)
        kept, offloaded, open_transient = _unit_bytes(layout, units)
        total += kept * flight
        host += offloaded * flight
        newest = 0.0 if layout.recomputes else max(unit.kept for unit in units if unit.layer)
        x = max(x, work.input_of(chunk))
        received = work.input_of(chunk) if layout.config.grid.pp > 1 else 0.0
        backward_transient = max(backward_transient, open_transient + received)
        if chunk.last:
            forward_transient = work.head.transient
            last = work.head.kept
        if chunk.first:
            first_transient = max(first_transient, units[0].transient)
    # Sent messages are waited for when so many wait (``core/pipeline/runner.py``).
    sends = SENDS_PER_CHUNK * len(layout.stages.chunks) if stage > 0 else 0
    forward = total + x * min(sends, layout.micro_batches - 1)
    backward = total + x * min(sends, layout.micro_batches) - last
    end_units = work.units_of(chunks[0])
    end = end_units[0].kept
    return (
        _Kept(forward, forward_transient, backward, backward_transient, backward - newest, end, first_transient, host),
        flights,
    )


def _unit_bytes(layout: Layout, units: Sequence[Unit]) -> tuple[float, float, float]:
    """(kept on the device, kept on the host, needed beside it while a unit's backward runs) of one micro-batch."""
    recompute = layout.config.recompute
    layers = [unit for unit in units if unit.layer]
    ends = sum(unit.kept for unit in units if not unit.layer)
    interval, block = recompute.recompute_interval, 0
    if recompute.recompute_method == "block":
        interval, block = 0, recompute.recompute_num_layers or 0
    elif recompute.recompute_method == "uniform":
        interval = interval or recompute.recompute_num_layers or 1
    spans = _spans(layers, interval, block)
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
        if recompute.recompute_partition and not layout.cut and not newest:
            share = 1 / layout.config.grid.mp
        if recompute.recompute_offload and not newest:
            host += x * share
            share = 0.0
        kept += x * share
        # Everything inside is there when the backward of the last operator begins.
        first = span[-1].parts[-1].transient + x
        worst = max(worst, first + inside + (x if share < 1 else 0.0))
    if len(stored) < len(spans) and stored:
        worst = max(worst, *(sum(unit.kept for unit in span) for span in stored))
    return kept, host, worst


def _spans(layers: Sequence[Unit], interval: int, block: int) -> list[tuple[Sequence[Unit], bool]]:
    """Layers that run together, and whether they are recomputed."""
    if interval:
        return [(layers[start : start + interval], True) for start in range(0, len(layers), interval)]
    return [((layer,), number < block) for number, layer in enumerate(layers)]


def in_flight(layout: Layout, stage: int) -> list[int]:
    """Micro-batches that wait for their backward at once, of every chunk of a stage, at the worst moment.

    1F1B: as many as stages follow, and one (arXiv 2104.04473, 2.2). Interleaved: Megatron's warm-up of
    2 (p - rank - 1) + (v - 1) p chunks and one, shared out from the first chunk on; zero-bubble warms up with
    (p - rank - 1) + (v - 1) p. GPipe keeps all. DualPipe: those of 1F1B in either direction, for the chunks of both.
    """
    p, v, m = layout.config.grid.pp, layout.config.pipeline.vpp_degree, layout.micro_batches
    name = layout.schedule
    if p == 1:
        return [1]
    if layout.assumed.dualpipe:
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
