"""Peak memory of a rank of each pipeline stage, in closed form.

Memory can peak at only a few moments of a step, and each is a sum:

    forward     the last forward is done: all activations, and the head's gradients on the last stage
    backward    a backward starts: activations, gradients of earlier micro-batches, temporary tensors of the backward
    reduction   the backward of the newest layer is done: the other activations, and gradients that are reduced or wait
    end         the last backward is nearly done: all gradients, and the buffers of their reduction
    update      Muon puts matrices together, or masters are copied to measure how far they move
    gather      the optimizer is done: new parameters are gathered

Main gradients are kept in flat buffers of their dtype over all micro-batches (stage 1), or pass through
buffers of the reduction's dtype (stage 2). torch has no caching allocator on a CPU, so communication buffers are kept
for the next step (``core/comm/buffers.py``), and a reduce-scatter needs a buffer for its result.

On a CPU a peak is a bound: a run needs at most that, and at least 1 / 1.15 of it
(``tests/tools/tracing/test_trace.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megapar.core.comm.rounds import axis_rounds, axis_size, queue_rounds
from megapar.core.device.kinds import COMMUNICATORS
from megapar.core.sharding.bucket_plan import IN_FLIGHT_BYTES, LEAST_IN_FLIGHT
from megapar.model.parameter import fp8_flag
from megapar.moe.dispatch_bytes import BETWEEN, WITHIN
from megapar.planning.activations import Activations, activations, stages_held
from megapar.planning.gathered_groups import StageBucket, Unsharded, buckets_of, unsharded
from megapar.planning.matrix_rounds import stage_rounds
from megapar.planning.planned_run import PlannedRun
from megapar.planning.traffic import STAGE, link
from megapar.training.building.partition import ITEM_BYTES

# In addition to tensors and communicators: the driver's context, and fragmentation of the caching allocator.
RESERVED_BYTES = round(0.75 * 2**30)
RESERVED_SHARE = 0.02
# Token ids, masks, scalars, and the words that ERNIE masks beyond the mean. On accelerators they are in RESERVED_SHARE.
UNCOUNTED_SHARE = 0.005
FP32 = ITEM_BYTES["fp32"]
FP8_BYTES = 2  # of an element of a weight in fp8 and of its transpose


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a rank of one stage.

    Attributes:
        parameters: Parameters in the compute dtype, and the casts of weights to fp8, as they are and transposed.
        gradients: Main gradients before and after their reduction.
        optimizer: Master weights and optimizer state.
        activations: Activations kept for their backward at the worst moment.
        buffers: Temporary tensors: communication buffers, gathered parameters, gradients of activations.
        peak: The highest sum of live bytes.
        groups: Buffers of communicators.
        reserved: Peak, groups, fragmentation and the driver's context.
        host: Offloaded bytes.
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
        optimizer: Master weights and optimizer state on the device.
        host: Master weights and optimizer state on the host.
        whole: Main gradients before their reduction.
        row: Main gradients after their reduction.
        alone: Main gradients of parameters that no other rank shards, which nothing reduces.
        scratch: Scratch buffers of the reduction.
        gathered: Gathered parameters after the optimizer's step (stages 1 and 2).
        unsharded: Whole parameters and their gradients in a backward (stage 3).
        pool: Communication buffers that a CPU keeps for the next step.
        tied: The head's gradient of a tied embedding, kept until the embedding's is added (stages 1 and 2).
    """

    parameters: float
    optimizer: float
    host: float
    whole: float
    row: float
    alone: float
    scratch: float
    gathered: float
    unsharded: Unsharded
    pool: float
    tied: float


def stage_memory(run: PlannedRun, stage: int) -> StageMemory:
    """Return the memory of the first rank of a stage."""
    kept = activations(run, stage)
    state = _state(run, stage, kept)
    pooled = run.kind.kernels == "cpu"
    full, there = run.cuts_parameters, state.unsharded
    # A CPU is its own host.
    steady = state.parameters + state.optimizer + (state.host + kept.host if pooled else 0.0)
    # Gradients of earlier micro-batches are live while all activations are kept.
    later = run.micro_batches > max(kept.in_flight)
    stage_one = run.config.sharding.gradient_merge_mode == "step"
    whole = state.pool if pooled else state.whole + state.scratch + state.row
    if pooled:
        early = whole if not full else state.pool + (state.row + there.sent if later else 0.0)
        whole += state.row if full else 0.0
    elif full:
        early = state.row + state.alone + there.sent if later else 0.0
    else:
        early = (state.whole if stage_one else state.row + state.alone) if later else 0.0
    waiting = _waiting(run, stage)
    reduced = whole if pooled else state.row + state.alone
    moments = {
        "forward": (kept.forward, early, kept.forward_transient + there.forward),
        "backward": (
            *(kept.backward, early + there.opened_shards),
            kept.backward_transient + state.tied + there.opened,
        ),
        "reduction": (kept.reduction, early + there.closed_shards, state.tied + there.closed + waiting[0]),
        "oldest layer": (kept.oldest, whole, state.tied + there.oldest),
        "end": (kept.end, whole, max(kept.end_transient, *waiting) + 2 * state.tied + there.end),
        "gather": (0.0, reduced, 0.0 if pooled else state.gathered),
        "update": (0.0, reduced, _of_update(run, stage)),  # only if it needs more than any other
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    live, gradients, _ = moments[moment]
    peak = (steady + sum(moments[moment])) * (1 + UNCOUNTED_SHARE * pooled)
    groups = group_bytes(run, stage)
    reserved = groups + (peak if pooled else peak * (1 + RESERVED_SHARE) + RESERVED_BYTES)
    return StageMemory(
        stage=stage,
        parameters=round(state.parameters),
        gradients=round(state.row + (state.whole if stage_one else state.alone)),
        optimizer=round(state.optimizer),
        activations=round(kept.backward),
        buffers=round(peak - steady - live - gradients),
        peak=round(peak),
        groups=groups,
        reserved=round(reserved),
        host=round(state.host + kept.host),
        moment=moment,
    )


def _of_update(run: PlannedRun, stage: int) -> float:
    """Return the bytes of temporary tensors of an update.

    Muon has messages, whole matrices and scaled gradients. --log-update-norms keeps the masters as they were.
    """
    rounds, options = stage_rounds(run, stage), run.config.optimizer
    held = float(rounds.held * ITEM_BYTES[run.matrix_dtype])
    if rounds.first and options.clip_grad > 0 and run.kind.kernels == "cuda" and run.view.wide_bytes == FP32:
        held += FP32 * sum(run.row_numel(row) for row in run.rows(stage) if row.matrix)
    if run.config.logging.log_update_norms:
        copies = 1 + run.config.optimizer.store_param_remainders  # before the update, and of split masters after it
        held += copies * run.view.wide_bytes * sum(run.row_numel(row) for row in run.rows(stage) if row.trainable)
    return held


def _waiting(run: PlannedRun, stage: int) -> tuple[float, float]:
    """Return the bytes of gradients that wait until their bucket can copy all of them at once (stage 1).

    They are those of the largest bucket of layers, and of the first bucket, which has the embedding.
    """
    sharding = run.config.sharding
    mixed = run.config.grid.pp > 1 and run.micro_batches > 1  # a bucket has gradients of several micro-batches
    packs = run.kind.device_class.packs_rows and sharding.gradient_merge_mode == "step"
    if mixed or run.cuts_parameters or not packs:
        return 0.0, 0.0
    sizes = [float(bucket.numel * bucket.item_bytes * (bucket.shards > 1)) for bucket in buckets_of(run, stage)]
    return max(sizes[1:-1] or sizes), sizes[0]


def group_bytes(run: PlannedRun, stage: int) -> int:
    """Return the bytes that the communicators of a rank of a stage keep."""
    grid, kept = run.config.grid, COMMUNICATORS[run.kind.kernels]
    if grid.world_size == 1:
        return 0
    queues = num_queues(run, stage) * run.kind.device_class.queue_blocks
    hops = [(axis,) for axis in (BETWEEN, WITHIN) if run.dispatch.node_ranks and link(grid, axis, run.node).ranks > 1]
    rounds = axis_rounds(grid)
    sizes = [grid.world_size, *(axis_size(grid, names[0]) for names in rounds if names[0] != "pp")]
    stages = [(STAGE,)] if run.with_matrices and grid.stage_ranks > 1 and grid.stage_ranks not in sizes else []
    return kept.of([("world",), *rounds, *hops, *stages], queues, link(grid, "ep", run.node).local - 1)


def num_queues(run: PlannedRun, stage: int) -> int:
    """Return the number of pipeline queues that start or end at a stage."""
    rounds = queue_rounds(run.config.grid.pp, closed=run.stages.last_sends_to_first)
    return sum(len(group) == 2 and stage in group for groups in rounds for group in groups)


def _state(run: PlannedRun, stage: int, kept: Activations) -> _State:
    sharding, stage_three = run.config.sharding, run.cuts_parameters
    e, w, reduce = run.view.item_bytes, run.view.wide_bytes, run.reduce_bytes
    parameters = masters = states = whole = row_bytes = alone = scratch = 0.0
    left = False  # stage 3 treats experts that are whole on their ranks like stage 2
    for spec in run.rows(stage):
        item = w if spec.fp32 else e
        local = run.local_numel(spec)
        if not spec.trainable:
            parameters += local * item
            continue
        row, shards = run.row_numel(spec), run.shards(spec)
        full = stage_three and not (spec.expert and shards == 1)
        left = left or (stage_three and not full)
        aliased = shards == 1 and item == w and not full
        parameters += row * w if full else local * (item + FP8_BYTES * run.in_fp8(fp8_flag(spec)))
        main = run.main_bytes(spec)
        masters += 0.0 if aliased or full else row * run.master_bytes(spec)
        states += run.state_bytes(spec) * row
        travels = sharding.gradient_merge_mode == "micro_batch" and shards > 1
        whole += 0.0 if full else row * shards * (reduce if travels else main)
        alone += row * main if shards == 1 and not full else 0.0
        if shards > 1 or full:
            row_bytes += row * main
            if reduce < main and not full and not travels:
                scratch += row * shards * reduce
    for other in stages_held(run, stage)[1:]:
        trained = (spec for spec in run.rows(other) if spec.trainable)
        parameters += sum(run.local_numel(spec) * (w if spec.fp32 else e) for spec in trained)
    pool = 0.0
    if run.kind.kernels == "cpu" and (left or not stage_three):
        pool = float(kept_buffers(run, buckets_of(run, stage, experts_only=left)))
    optimizer = masters + states
    host = optimizer if sharding.optimizer_offload else 0.0
    pending = 0.0
    chunk_ends = run.stages.on(stage)
    if run.costs.tied and any(c.first for c in chunk_ends) and any(c.last for c in chunk_ends):
        pending = e * -(-run.sizes.vocab_size // run.view.mp) * run.sizes.hidden_size
    there = Unsharded()
    if stage_three:
        there, pending = unsharded(run, stage, kept.backward - kept.reduction, pending), 0.0
    gathered = 0.0 if stage_three else _gathered(run, stage)
    return _State(parameters, optimizer - host, host, whole, row_bytes, alone, scratch, gathered, there, pool, pending)


def _gathered(run: PlannedRun, stage: int) -> float:
    """Return the bytes of gathered parameters and of this rank's shards of them (stages 1 and 2).

    With remainders an update writes all of this rank's shards before the first is gathered.
    """
    cast = [bucket for bucket in buckets_of(run, stage) if bucket.cast]
    ahead = run.config.sharding.sharding_prefetch_segments + 1
    if run.config.optimizer.store_param_remainders:
        rows = sum(bucket.shard_numel * bucket.item_bytes for bucket in cast)
        return rows + _largest([bucket.numel * bucket.item_bytes for bucket in cast], ahead)
    return _largest([(bucket.numel + bucket.shard_numel) * bucket.item_bytes for bucket in cast], ahead)


def kept_buffers(run: PlannedRun, buckets: Sequence[StageBucket]) -> int:
    """Return a bound of the communication buffers that a CPU keeps for the next step (``core/comm/buffers.py``).

    Of each size there are as many as reductions use at once. Gathers, which a save lets run all at once, have buffers
    besides those: for the segments that are gathered ahead, and where there are more segments than other buffers.
    """
    sharding, reduced = run.config.sharding, run.reduce_bytes
    each = sharding.gradient_merge_mode == "micro_batch"
    cut = [bucket for bucket in buckets if bucket.shards > 1]
    wholes, rows = Counter[int](), Counter[int]()
    for in_flight in _in_flight(cut, reduced):
        accumulated = in_flight if each or run.micro_batches == 1 else cut
        messages = [bucket.numel * reduced for bucket in in_flight]
        messages += [bucket.numel * reduced for bucket in in_flight if not each and bucket.main_bytes != reduced]
        wholes |= Counter(
            [*messages, *(bucket.numel * (reduced if each else bucket.main_bytes) for bucket in accumulated)]
        )
        added = each and run.micro_batches > 1
        rows |= Counter(bucket.shard_numel * reduced for bucket in in_flight if added or reduced < bucket.main_bytes)
    ahead = sharding.sharding_prefetch_segments if sharding.overlap_param_gather != "off" else 0
    gathered = _largest([bucket.numel * bucket.item_bytes for bucket in cut], max(ahead + 1, len(cut) - wholes.total()))
    casts = [bucket.shard_numel * bucket.item_bytes for bucket in buckets if bucket.cast]
    updated = len(casts) if run.config.optimizer.store_param_remainders else ahead + 1
    gathered += _largest(casts, max(updated, len(casts) - rows.total()))
    gradients = sum(bucket.shard_numel * bucket.main_bytes for bucket in buckets)
    return gradients + gathered + sum(size * count for size, count in (*wholes.items(), *rows.items()))


def _in_flight(buckets: Sequence[StageBucket], reduced: int) -> Iterator[list[StageBucket]]:
    """Yield the buckets whose reductions are in flight when one more is started (``core/sharding/zero.py``)."""
    in_flight: list[StageBucket] = []
    for bucket in reversed(buckets):
        if in_flight and in_flight[-1].replicated:
            del in_flight[:-1]
        in_flight.append(bucket)
        yield in_flight
        while len(in_flight) > LEAST_IN_FLIGHT and sum(each.numel * reduced for each in in_flight) > IN_FLIGHT_BYTES:
            del in_flight[0]


def _largest(sizes: Sequence[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])
