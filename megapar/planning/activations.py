"""Bytes of activations on a stage at the moments of a step, by a walk through the backward of each chunk.

    forward    unit 0   unit 1   ..   unit n   head
    backward                     ..   unit n              alive: what units 0 .. n-1 keep, and the peak of unit n
                        unit 1                            alive: what unit 0 keeps, and the peak of unit 1

A unit's peak (``UnitCost.peak``) goes through its operators: the backward of an operator needs what it and the earlier
operators keep, and temporary tensors. A recomputed unit keeps its input only, and has all of this while it runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megapar.core.pipeline.schedule import GPIPE, INTERLEAVED, SENDS_PER_CHUNK, ZERO_BUBBLE
from megapar.core.pipeline.stages import Chunk
from megapar.core.recompute.choice import NEWEST_WHOLE
from megapar.model.cost.model_cost import UnitCost
from megapar.planning.planned_run import PlannedRun, units_of
from megapar.planning.traffic import kept_share


@dataclass(frozen=True)
class Activations:
    """Bytes of activations and of temporary tensors at the moments of a step.

    Attributes:
        forward: Activations after the last forward.
        forward_transient: Temporary tensors at that moment.
        backward: Activations when a backward starts.
        backward_transient: More bytes at the worst moment of that backward.
        reduction: Activations after the backward of the newest layer.
        oldest: Activations and temporary tensors in the last backward of the oldest layer.
        end: Activations when the last backward is nearly done.
        end_transient: Temporary tensors at that moment.
        host: Offloaded activations.
        in_flight: Micro-batches in flight of each chunk.
    """

    forward: float
    forward_transient: float
    backward: float
    backward_transient: float
    reduction: float
    oldest: float
    end: float
    end_transient: float
    host: float
    in_flight: tuple[int, ...]


@dataclass(frozen=True)
class _Walk:
    """One micro-batch's bytes in a chunk.

    Attributes:
        kept: Activations that the forward keeps, with the inputs of recomputed units as they are stored.
        whole: Bytes by which the inputs of the newest units are larger, because they are not stored.
        host: Inputs in host memory.
        opened: More bytes at the worst moment of the backward.
        oldest: Most bytes in the backward of the chunk's first layer.
        newest: Activations of the last layer, which its backward frees.
    """

    kept: float
    whole: float
    host: float
    opened: float
    oldest: float
    newest: float


def stages_held(run: PlannedRun, stage: int) -> tuple[int, ...]:
    """Return the stages whose layers a rank runs; with DualPipe also the mirrored stage, for the other direction."""
    return (stage, run.config.grid.pp - 1 - stage) if run.assumed.both_directions else (stage,)


def activations(run: PlannedRun, stage: int) -> Activations:
    """Return the bytes of activations at all moments of a step on a stage."""
    costs = run.largest_costs
    chunks = [chunk for each in stages_held(run, stage) for chunk in run.stages.on(each)]
    flights = in_flight(run, stage)
    last_in_flight = max(flights) == 1
    walks = [
        _walk(run, units_of(costs, chunk), costs.context, received=not chunk.first, last_in_flight=last_in_flight)
        for chunk in chunks
    ]
    total = sum(walk.kept * flight for walk, flight in zip(walks, flights, strict=True))
    total += max(walk.whole for walk in walks)
    heads = [flight for chunk, flight in zip(chunks, flights, strict=True) if chunk.last]
    if heads:  # its gradients, which the forward makes
        total += costs.head.kept * (heads[0] - 1)
    backward = total + _sent(run, chunks, flights) * max(costs.layer(chunk.layers[0]).input for chunk in chunks)
    # The newest micro-batch's context, and the input of the head, which a pipeline's runner holds.
    at_head = costs.head.kept + (0.0 if run.recompute else costs.context)
    at_head += costs.head.input if run.config.grid.pp > 1 else 0.0
    return Activations(
        forward=backward + (at_head if heads else 0.0),
        forward_transient=costs.head.transient if heads else 0.0,
        backward=backward,
        backward_transient=max(walk.opened for walk in walks),
        reduction=backward - walks[-1].newest,
        oldest=walks[0].oldest,
        end=units_of(costs, chunks[0])[0].kept,
        end_transient=max((costs.embedding.transient for chunk in chunks if chunk.first), default=0.0),
        host=sum(walk.host * flight for walk, flight in zip(walks, flights, strict=True)),
        in_flight=tuple(flights),
    )


def _sent(run: PlannedRun, chunks: Sequence[Chunk], flights: Sequence[int]) -> int:
    """Return the number of messages that a stage has sent when its last forward is done, and still keeps.

    The runner waits for the oldest one only when there are too many (``core/pipeline/runner.py``).
    """
    m, every = run.micro_batches, run.stages.chunks
    sent = 0
    for chunk, flight in zip(chunks, flights, strict=True):
        sent += m * (not chunk.last and every[chunk.index + 1].rank != chunk.rank)
        sent += (m - flight) * (not chunk.first and every[chunk.index - 1].rank != chunk.rank)
    return min(sent, SENDS_PER_CHUNK * len(every))


def _walk(run: PlannedRun, units: Sequence[UnitCost], context: float, *, received: bool, last_in_flight: bool) -> _Walk:
    """Return one micro-batch's bytes in a chunk's units, without those of the head after the final norm.

    Args:
        context: Bytes that recomputed layers share.
        received: The input is from another stage, and held for its gradient.
        last_in_flight: No later micro-batch is in flight, so that the newest units still have their whole inputs.
    """
    layers = [unit for unit in units if unit.is_layer]
    spans = [(layers[span.start : span.stop], span.recomputed) for span in run.recompute_spans(len(layers))]
    share = kept_share(run)
    share, host_share = (0.0, share) if run.config.recompute.recompute_offload else (share, 0.0)
    first_whole = sum(recomputed for _, recomputed in spans) - NEWEST_WHOLE
    kept = sum(unit.kept for unit in units if unit.name == "embedding")
    kept += context * any(recomputed for _, recomputed in spans)
    if received and not spans[0][1]:
        kept += layers[0].input - layers[0].input_kept
    whole = host = fetched = peak = oldest = newest = 0.0
    number = 0
    for span, recomputed in spans:
        if recomputed:
            x = span[0].input
            stored, newest = x * share, 0.0
            also_received = x if received and number == 0 and share < 1.0 else 0.0
            fetches = share < 1.0 and not (last_in_flight and number >= first_whole)
            # Its own input, what that is fetched from, and the previous one, which is fetched meanwhile.
            unit_peak = _again_peak(span) + x + fetched + (stored + also_received if fetches else 0.0)
            before = whole if last_in_flight else 0.0
            whole += x - stored if number >= first_whole and not also_received else 0.0
            host, fetched, number = host + x * host_share, x if fetches else 0.0, number + 1
            stored += also_received
        else:
            unit_peak, before = _span_peak(span), whole if last_in_flight else 0.0
            stored = newest = sum(unit.kept for unit in span)
        peak = max(peak, kept + before + unit_peak)
        oldest = oldest or peak
        kept += stored
    last = next((unit.operators[0] for unit in units if unit.name == "head"), None)
    before = whole if last_in_flight else 0.0
    if last is not None and last.transient:
        peak = max(peak, kept + before + last.kept + last.transient)
    return _Walk(kept, whole, host, max(0.0, peak - kept - before), oldest, newest)


def _again_peak(span: Sequence[UnitCost]) -> float:
    """Return the most bytes alive while layers run again, with the gradient of their output, and in their backward."""
    working = _highest(span, [unit.working for unit in span]) + span[-1].arriving + span[-1].input
    return max(_span_peak(span), working) + sum(unit.kept_again for unit in span) - span[0].input_kept


def _span_peak(span: Sequence[UnitCost]) -> float:
    """Return the most bytes alive in the backward of layers, all of whose activations are there when it starts."""
    return _highest(span, [unit.peak for unit in span])


def _highest(span: Sequence[UnitCost], peaks: Sequence[float]) -> float:
    """Return the highest of the units' peaks, each on top of what the units before it keep."""
    kept = accumulate((unit.kept for unit in span), initial=0.0)
    return max(before + peak for before, peak in zip(kept, peaks, strict=False))


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
    if run.assumed.both_directions:
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
