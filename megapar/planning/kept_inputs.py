"""Messages that keep the inputs of recomputed units outside the device, and fetch them: over mp, and to the host.

``--recompute-partition`` keeps a shard of each input on every mp rank, ``--recompute-offload`` a copy in host memory.
The newest units of a rank stay whole on the device (``core/recompute/saved_inputs.py``): their copies to the host are
made in any case, but nothing is fetched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from megapar.core.pipeline.schedule import GPIPE
from megapar.core.recompute.choice import NEWEST_WHOLE
from megapar.model.cost.model_cost import CommCost
from megapar.planning.planned_run import PlannedRun

HOST, TO_HOST, TO_DEVICE = "host", "to_host", "to_device"


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
            found = []
            if offloads:
                found = [CommCost(HOST, TO_HOST, size, "forward"), CommCost(HOST, TO_DEVICE, fetched, "backward")]
            if share < 1.0:
                found.append(CommCost("mp", "all_gather", fetched * (run.config.grid.mp - 1), "backward"))
            messages[layer] = tuple(one for one in found if one.bytes)
    return messages


def host_traffic(run: PlannedRun, stage: int) -> dict[str, float]:
    """Return the bytes that a rank of a stage copies between host and device in a step, by "host/kind".

    Offloaded masters and optimizer state are copied both ways once per step.
    """
    copied: defaultdict[str, float] = defaultdict(float)
    for messages in recompute_messages(run, stage).values():
        for one in messages:
            if one.axis == HOST:
                copied[f"{HOST}/{one.kind}"] += one.bytes * run.micro_batches
    if run.config.sharding.optimizer_offload:
        rows = sum(run.row_numel(row) for row in run.held(stage) if row.trainable)
        for kind in (TO_HOST, TO_DEVICE):
            copied[f"{HOST}/{kind}"] += (1 + run.optimizer_states) * run.view.wide_bytes * rows
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
    """Return, for each chunk of a stage, how often so many units run between a forward's end and its backward."""
    chunks = run.stages.on(stage)
    units = [sum(span.recomputed for span in run.recompute_spans(len(chunk.layers))) for chunk in chunks]
    ends: list[list[int]] = [[] for _ in chunks]
    found: list[Counter[int]] = [Counter() for _ in chunks]
    seen, entered = [0] * len(chunks), 0
    for forward, place in _program(run, stage, len(chunks)):
        if forward:
            entered += units[place]
            ends[place].append(entered)
        else:
            found[place][entered - ends[place][seen[place]]] += 1
            seen[place] += 1
    return found


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
