"""Time of a step: its pipeline, whose stages run their drawn programs (``stage_time``), and what follows it.

One law holds by construction: a step takes at least as long as any link, or the compute units, are busy.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from megapar.core.pipeline.schedule import GPIPE, ZERO_BUBBLE
from megapar.model.cost.model_cost import CommCost
from megapar.model.flops import step_flops
from megapar.planning.calibration import MEGAPAR, Calibration, calibrations
from megapar.planning.gathered_groups import gathered_groups
from megapar.planning.matrix_rounds import MatrixRound, stage_rounds
from megapar.planning.memory import num_queues
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.stage_time import StagePrograms, StageTime
from megapar.planning.timeline import LINKS, TO_HOST, Flight, Span
from megapar.planning.traffic import HOST, STAGE, pipeline_traffic, step_traffic
from megapar.training.building.partition import ITEM_BYTES

# Muon's passes over the elements of masters (momentum, look-ahead, message, update) and of whole matrices (put
# together, stacked, normalized, packed), and the kernels that update a piece (``core/optimizer/muon.py``).
_MATRIX_UPDATE, _MATRIX_COPIES, _UPDATE_KERNELS = 16, 11, 4


@dataclass(frozen=True)
class Speed:
    """Time of one optimizer step.

    Attributes:
        step_seconds: Time of the whole step.
        bubble_share: Pipeline bubble: share of the pipeline's time in which ranks wait.
        exposed_seconds: Time of exposed communication on the slowest stage.
        fill_seconds: Time in which the slowest stage waits for the pipeline to fill and to drain.
        hop_seconds: Time of exposed messages between stages, a part of ``exposed_seconds``.
        jitter_seconds: Time of waits for ranks that are slower in this step.
        newton_schulz_seconds: Time of Muon's iterations, a part of ``optimizer_seconds``.
        matrix_seconds: Time of the messages of matrices, exposed or not.
        flops: Model FLOPs of all ranks.
        extra_flops: FLOPs of all ranks that are run beyond those, without recomputed units.
        mfu: Model FLOPs utilization, a share of the peak.
        tokens_per_second: Tokens per second of all ranks.
    """

    step_seconds: float
    bubble_share: float
    exposed_seconds: float
    optimizer_seconds: float
    fill_seconds: float
    hop_seconds: float
    jitter_seconds: float
    newton_schulz_seconds: float
    matrix_seconds: float
    flops: float
    extra_flops: float
    mfu: float
    tokens_per_second: float


def predict(run: PlannedRun, calibration: Calibration | None = None) -> Speed:
    """Predict the speed of a run, by the calibration of the software that it assumes if none is given."""
    grid, m = run.config.grid, run.micro_batches
    calibration = calibration or calibrations()[run.assumed.software]
    clock = Clock(run, calibration)
    times = [clock.stage(stage) for stage in range(grid.pp)]
    slowest = max(times, key=lambda time: time.both)
    both = sum(time.both for time in times)
    fill = (both - slowest.both) / run.config.pipeline.vpp_degree * _fill(run)
    messages = hops(run) * clock.hop()
    pipeline = m * slowest.both + fill + messages
    reduction, optimizer = max((clock.step_end(stage, times[stage]) for stage in _ends(grid.pp)), key=sum)
    matrices = max((clock.matrices(stage) for stage in _ends(grid.pp)), key=lambda time: time.computed + time.exposed)
    jitter = 1 + calibration.jitter * (grid.world_size.bit_length() - 1)
    seconds = (pipeline + reduction + optimizer + matrices.computed + matrices.exposed) * jitter
    flops = model_flops(run)
    tokens = run.config.training.global_batch_size * run.sizes.seq_length
    return Speed(
        step_seconds=seconds,
        bubble_share=1 - m * both / grid.pp / pipeline,
        exposed_seconds=m * slowest.exposed + reduction + messages + matrices.exposed,
        optimizer_seconds=optimizer + matrices.computed,
        fill_seconds=fill,
        hop_seconds=messages,
        jitter_seconds=seconds * (1 - 1 / jitter),
        newton_schulz_seconds=matrices.computed,
        matrix_seconds=matrices.sent,
        flops=flops,
        extra_flops=extra_flops(run),
        mfu=flops / seconds / grid.world_size / run.kind.peak(run.dtype),
        tokens_per_second=tokens / seconds,
    )


def model_flops(run: PlannedRun) -> float:
    """Return the model FLOPs of a step (``model/flops.py``)."""
    return float(step_flops(run.sizes, run.config.training.global_batch_size, run.sizes.seq_length))


def extra_flops(run: PlannedRun) -> float:
    """Return the FLOPs of a step that attention runs beyond the model FLOPs (``OpCost.extra``)."""
    return of_all_layers(run, sum(operator.extra_flops for operator in run.costs.attention))


def of_all_layers(run: PlannedRun, flops: float) -> float:
    """Return the FLOPs of a step whose layers have this many per micro-batch on a rank."""
    grid = run.config.grid
    per_sequence = flops * grid.mp * grid.cp / run.view.samples
    return per_sequence * run.sizes.num_layers * run.config.training.global_batch_size


def _ends(pp: int) -> list[int]:
    return sorted({0, pp // 2, pp - 1})


def _fill(run: PlannedRun) -> float:
    """Return the fill and drain time, relative to that of a plain pipeline."""
    if run.assumed.both_directions:
        return 0.3  # DualPipe
    return 1 / 3 if run.schedule == ZERO_BUBBLE else 1.0


def hops(run: PlannedRun) -> int:
    """Return the number of consecutive messages between stages in a step that nothing hides.

    The formulas equal the delay of simulated schedules (``simulate``) in messages, with the runner's queues, for
    messages that are short relative to a forward. In 1F1B the last stages wait for each other, so some messages of
    each micro-batch are exposed; in the other schedules only those of filling and draining. With a limited lookahead
    the result is an upper bound.
    """
    p, v, m = run.config.grid.pp, run.config.pipeline.vpp_degree, run.micro_batches
    if p == 1:
        return 0
    ahead = run.kind.device_class.receives_ahead if run.assumed.software == MEGAPAR else None
    if ahead is not None and (v == 1 or ahead == 0):  # each message waits for a computation of its receiver
        return 2 * (v * m + v * p - 2)
    if run.assumed.both_directions or run.schedule == GPIPE:
        return 2 * (p - 1)
    if run.schedule == ZERO_BUBBLE:
        if v == 2:  # V-shaped
            return 4 * p - 4 if m == p else 5 * p - 7
        return (v + 3) * p - (6 if m == p else 4)
    return 2 * (m + p - 3 - (m - 2) // p) if v == 1 else 2 * (v * p - 1)


class MatrixTime(NamedTuple):
    """Seconds of Muon's rounds in a step: of iterations, of messages, and of those that no iterations hide."""

    computed: float
    sent: float
    exposed: float


class Clock:
    """Times of the stages of one run and of the end of a step, in seconds."""

    def __init__(self, run: PlannedRun, calibration: Calibration) -> None:
        self._run = run
        self._time = OperatorTime(run, calibration)
        self._programs = StagePrograms(run, self._time)
        self._sent = [pipeline_traffic(run, stage) / run.micro_batches for stage in range(run.config.grid.pp)]

    def stage(self, stage: int) -> StageTime:
        """Return the time of one micro-batch on one stage, in which all of its messages have their links' time."""
        time, sent = self._programs.stage(stage), self._flight("pp", "send", self._sent[stage] / 2)
        beside = beside_receives(self._run, stage)
        forward, backward = (_slower(span, beside) for span in (time.forward, time.backward))
        return StageTime(_least(forward, sent), _least(backward, sent), time.weight * beside)

    def hop(self) -> float:
        """Return the time of one message between two stages."""
        run = self._run
        if run.config.grid.pp == 1:
            return 0.0
        return self._flight("pp", "send", run.view.item_bytes * run.view.local_tokens * run.sizes.hidden_size).seconds

    def step_end(self, stage: int, time: StageTime) -> tuple[float, float]:
        """Return the times (exposed reductions and gathers, optimizer) at the end of a step on a stage.

        Reductions travel under the backward of the last micro-batch or of all, gathers under forwards (at stage 3 also
        under backwards), on what the layers' own messages leave of each link, one group of parameters after another.
        """
        run, sharding, m = self._run, self._run.config.sharding, self._run.micro_batches
        often = m if sharding.gradient_merge_mode == "micro_batch" else 1
        full, order = sharding.sharding_stage == 3, _GroupOrder(run, stage)
        reduce, gather, bare = Span(), Span(), 0.0
        for name, size in step_traffic(run, stage).items():
            axis, kind = name.split("/")
            flight = self._flight(axis, kind, size)
            if axis.removeprefix("expert_") not in ("shard", "replica"):
                bare += flight.seconds
            elif kind == "all_gather":
                gather = gather.plus(_span(flight, order.number * (2 * m if full else 1)))
            else:
                reduce = reduce.plus(_span(flight, order.number * often))
        reduces, gathers = sharding.overlap_grad_reduce != "off", sharding.overlap_param_gather != "off"
        back = gather.plus(gather, order.again - 1) if full else Span()
        there, runs = gather.plus(back, -1), m if full else 1
        shown = _left(there, time.forward, runs * gathers, order.waits(there.seconds / runs, time.forward.seconds))
        late = order.waits(back.seconds / m, time.backward.seconds, back=True)
        end = order.waits(reduce.seconds / often, time.backward.seconds, ahead=order.number)
        if full and gathers and reduces:  # both share the backward
            shown += _left(back.plus(reduce), time.backward, m, late + end * often / m)
        else:
            shown += _left(back, time.backward, m * gathers, late)
            shown += _left(reduce, time.backward, often * reduces, end)
        return shown + bare, self._optimizer(stage)

    def matrices(self, stage: int) -> MatrixTime:
        """Return the time of Muon's rounds: a round iterates under the gather of the next and the scatter of the last.

        Ranks wait for each other in each round, so that a message is the larger of the two that are known.
        """
        run, rounds = self._run, stage_rounds(self._run, stage)
        item, pairs = ITEM_BYTES[run.matrix_dtype], list(zip(rounds.first, rounds.busiest, strict=True))

        def seconds(elements: int) -> float:
            return self._flight(STAGE, "all_to_all", elements * item).seconds

        gathers = [seconds(max(one.sent - one.kept for one in pair)) for pair in pairs]
        scatters = [seconds(max(one.given - one.kept for one in pair)) for pair in pairs]
        iterations = [self._iterations(one) for one in rounds.busiest]
        under = zip([*gathers[1:], 0.0], [0.0, *scatters[:-1]], iterations, strict=False)  # of no rounds, nothing
        exposed = sum(max(0.0, after + before - hidden) for after, before, hidden in under)
        return MatrixTime(sum(iterations), sum(gathers) + sum(scatters), exposed + sum(gathers[:1] + scatters[-1:]))

    def _iterations(self, of: MatrixRound) -> float:
        """Return the time in which a rank puts its matrices of a round together, and orthogonalizes them.

        Each piece is copied into its matrix and updates its masters by kernels that the host launches one by one.
        """
        run = self._run
        rate = run.kind.flops.get(run.matrix_dtype, run.kind.peak(run.dtype)) / run.kind.peak(run.dtype)
        products = self._time.products(of.products(run.config.optimizer.muon_num_ns_steps)) / rate
        copied = self._time.moved(_MATRIX_COPIES * of.whole * ITEM_BYTES[run.matrix_dtype])
        launched = (of.received + _UPDATE_KERNELS * of.updated) * run.kind.device_class.launch_seconds
        return max(products + copied, launched)

    def _optimizer(self, stage: int) -> float:
        """Return the time of the update, under which offloaded state is copied from the host and back."""
        run, moved, kept, wide = self._run, 0.0, 0.0, self._run.view.wide_bytes
        for row, count in run.distinct_rows(stage):
            if row.trainable:
                states, elements = run.state_bytes(row), run.row_numel(row) * count
                # Remainders are read and written besides the weights: in all as many bytes as masters.
                plain = 2 * wide + run.main_bytes(row) + 2 * states
                moved += elements * (_MATRIX_UPDATE * wide if row.matrix else plain)
                kept += elements * (wide + states)
        update = self._time.moved(moved)
        if not run.config.sharding.optimizer_offload:
            return update
        state = CommCost(HOST, TO_HOST, kept, "backward")
        return max(update, self._programs.operators.flight(state).seconds)

    def _flight(self, axis: str, kind: str, size: float) -> Flight:
        return self._programs.operators.flight(CommCost(axis, kind, size, "forward"))


def beside_receives(run: PlannedRun, stage: int) -> float:
    """Return the factor of a stage's computations beside receives that are posted early and wait (``lookahead``).

    Those of a limited lookahead are posted when their message is due, as Megatron-LM's are, and hold little.
    """
    device = run.kind.device_class
    if run.config.grid.pp == 1 or run.assumed.software != MEGAPAR or device.receives_ahead is not None:
        return 1.0
    return device.beside_queues[num_queues(run, stage) // 2]


def _slower(time: Span, factor: float) -> Span:
    """Return a program whose computations take ``factor`` times as long."""
    more = (time.seconds - time.waited) * (factor - 1)
    return Span(time.seconds + more, time.waited, time.slowed + more, time.busy)


class _GroupOrder:
    """The groups of a stage's parameters in the order of their use.

    Attributes:
        number: How many there are.
        again: Share of the gathers that are repeated for the backward (stage 3).
    """

    def __init__(self, run: PlannedRun, stage: int) -> None:
        groups, sharding = gathered_groups(run, stage), run.config.sharding
        units: dict[str, float] = defaultdict(float)
        for group in groups:
            for unit, size in group.sizes.items():
                units[unit] += size
        layers = [unit for unit in units if unit.startswith("layers.")]
        total, once = sum(units.values()) or 1.0, sum(group.bytes for group in groups if group.stays_gathered)
        self.number, self.again = len(groups), (total - once) / (2 * total - once)
        self._sizes = [group.bytes / total for group in groups]
        self._sizes_again = [0.0 if group.stays_gathered else group.bytes / max(1.0, total - once) for group in groups]
        self._windows = [
            sum(group.sizes.get(unit, 0.0) / units[unit] for unit in layers) / max(1, len(layers)) for group in groups
        ]
        # FSDP2 gathers one ahead by itself.
        self._ahead = max(sharding.sharding_prefetch_segments, 1 if sharding.sharding_stage == 3 else 0)

    def waits(self, sent: float, window: float, *, back: bool = False, ahead: int | None = None) -> float:
        """Return the time for which a forward, or backward, of ``window`` seconds waits for gathers of ``sent``.

        Reductions end as late after a backward, which is the forward's mirror, as gathers make a forward wait if all
        are launched at once: ``ahead`` is the number of groups then.
        """
        link = clock = 0.0
        reached: list[float] = []
        parts = list(zip(self._sizes_again if back else self._sizes, self._windows, strict=True))
        for number, (size, part) in enumerate(parts[::-1] if back else parts):
            reached.append(clock)
            launched = reached[max(0, number - (self._ahead if ahead is None else ahead))]
            link = max(link, launched) + size * sent
            clock = max(clock, link if size else 0.0) + part * window
        return clock - sum(self._windows) * window


def _span(flight: Flight, messages: int = 1) -> Span:
    """Return a message that runs alone, or as this many, one after another."""
    loads = dict(flight.loads)
    seconds = flight.seconds + max(0, messages - 1) * flight.latency
    return Span(seconds, busy=tuple(loads.get(link, 0.0) for link in LINKS))


def _least(time: Span, sent: Flight) -> Span:
    """Return the time of a forward or backward with a message to another stage: at least its busiest link's."""
    busy = _span(sent).plus(time).busy
    missing = max(0.0, max(busy) - time.seconds)
    return Span(time.seconds + missing, time.waited + missing, time.slowed, busy)


def _left(sent: Span, window: Span, times: float, bare: float) -> float:
    """Return the time of messages that ``times`` runs of a window do not hide.

    Each link hides what the window's own messages leave of it; ``bare`` seconds of each run have nothing to hide under.
    """
    if not times:
        return sent.seconds
    free = [times * (window.seconds - own) for own in window.busy]
    late = max(0.0, *(more - room for more, room in zip(sent.busy, free, strict=True)))
    return max(late, times * bare)
