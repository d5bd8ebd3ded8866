"""Time of a step: matrix products, attention, memory-bound operators and exposed communication, stage by stage.

All models, devices and layouts have one calibration, which ``benchmarks/prediction`` compares with published runs.

Tested in ``tests/planning/test_queues.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from megapar.core.device.kinds import LINK_SHARE, DeviceKind
from megapar.core.pipeline.schedule import GPIPE, ZERO_BUBBLE
from megapar.core.tensor_parallel.overlap_price import OFF
from megapar.model.cost.model_cost import CommCost, OpCost, Product, UnitCost
from megapar.model.flops import step_flops
from megapar.planning.planned_run import PlannedRun, units_of
from megapar.planning.traffic import Link, link, stage_traffic


@dataclass(frozen=True)
class Calibration:
    """Shares of the data sheets' figures that devices reach.

    Attributes:
        product: Share of peak FLOP/s of a large matrix product.
        small: Smallest dim at which a matrix product reaches half of that.
        fp8: Share of peak fp8 FLOP/s of a matrix product that casts its inputs.
        scores: Share of peak FLOP/s of attention's core.
        memory: Share of the memory bandwidth.
        inside: Share of the bandwidth inside a node.
        between: Share of the bandwidth between nodes.
        shown: Share of a collective that even a long enough matrix product does not hide.
        jitter: Share of the time lost to stragglers for each doubling of the ranks.
    """

    product: float = 0.76
    small: float = 350.0
    fp8: float = 0.65
    scores: float = 0.38
    memory: float = 0.70
    inside: float = LINK_SHARE
    between: float = 0.85
    shown: float = 0.25
    jitter: float = 0.0005


CALIBRATION = Calibration()


@dataclass(frozen=True)
class StageTime:
    """Time of one micro-batch on a stage, in seconds.

    Attributes:
        forward: Time of the forward.
        backward: Time of the backward, including recomputation.
        exposed: Time of exposed communication in both.
    """

    forward: float
    backward: float
    exposed: float

    @property
    def both(self) -> float:
        """Time of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Speed:
    """Time of one optimizer step.

    Attributes:
        step_seconds: Time of the whole step.
        bubble_share: Pipeline bubble: share of the pipeline's time in which ranks wait.
        exposed_seconds: Time of exposed communication on the slowest stage.
        optimizer_seconds: Time of the optimizer.
        flops: Model FLOPs of all ranks.
        extra_flops: FLOPs of all ranks that are run beyond those, without recomputed units.
        mfu: Model FLOPs utilization, a share of the peak.
        tokens_per_second: Tokens per second of all ranks.
    """

    step_seconds: float
    bubble_share: float
    exposed_seconds: float
    optimizer_seconds: float
    flops: float
    extra_flops: float
    mfu: float
    tokens_per_second: float


def predict(run: PlannedRun, calibration: Calibration = CALIBRATION) -> Speed:
    """Predict the speed of a run."""
    grid, m = run.config.grid, run.micro_batches
    clock = Clock(run, calibration)
    times = [clock.stage(stage) for stage in range(grid.pp)]
    slowest = max(times, key=lambda time: time.both)
    both = sum(time.both for time in times)
    fill = (both - slowest.both) / run.config.pipeline.vpp_degree * _fill(run)
    messages = hops(run) * clock.hop()
    pipeline = m * slowest.both + fill + messages
    reduction, optimizer = max(clock.step_end(stage, times[stage]) for stage in _ends(grid.pp))
    jitter = 1 + calibration.jitter * (grid.world_size.bit_length() - 1)
    seconds = (pipeline + reduction + optimizer) * jitter
    flops = model_flops(run)
    tokens = run.config.training.global_batch_size * run.sizes.seq_length
    return Speed(
        step_seconds=seconds,
        bubble_share=1 - m * both / grid.pp / pipeline,
        exposed_seconds=m * slowest.exposed + reduction + messages,
        optimizer_seconds=optimizer,
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
    return _of_all_layers(run, sum(operator.extra_flops for operator in run.costs.attention))


def attention_flops(run: PlannedRun) -> float:
    """Return the FLOPs of attention's core in a step, forward and backward; of causal attention only the lower half."""
    return 3 * _of_all_layers(run, sum(operator.scores for operator in run.costs.attention))


def _of_all_layers(run: PlannedRun, flops: float) -> float:
    """Return the FLOPs of a step whose layers have so many per micro-batch on a rank."""
    grid = run.config.grid
    per_sequence = flops * grid.mp * grid.cp / run.view.samples
    return per_sequence * run.sizes.num_layers * run.config.training.global_batch_size


def _ends(pp: int) -> list[int]:
    return sorted({0, pp // 2, pp - 1})


def _fill(run: PlannedRun) -> float:
    """Return the fill and drain time, relative to that of a plain pipeline."""
    if run.assumed.dualpipe:
        return 0.3
    return {ZERO_BUBBLE: 1 / 3, GPIPE: 1.0}.get(run.schedule, 1.0)


def hops(run: PlannedRun) -> int:
    """Return the number of consecutive messages between stages in a step that nothing hides.

    The formulas equal the delay of simulated schedules (``simulate``) in messages, with the runner's queues, for
    messages that are short relative to a forward. In 1F1B the last stages wait for each other, so some messages of
    each micro-batch are exposed; in the other schedules only those of filling and draining.
    """
    p, v, m = run.config.grid.pp, run.config.pipeline.vpp_degree, run.micro_batches
    if p == 1:
        return 0
    if run.assumed.dualpipe or run.schedule == GPIPE:
        return 2 * (p - 1)
    if run.schedule == ZERO_BUBBLE:
        if v == 2:  # V-shaped
            return 4 * p - 4 if m == p else 5 * p - 7
        return (v + 3) * p - (6 if m == p else 4)
    return 2 * (m + p - 3 - (m - 2) // p) if v == 1 else 2 * (v * p - 1)


class Clock:
    """Times of the operators and the communication of one run, in seconds."""

    def __init__(self, run: PlannedRun, calibration: Calibration) -> None:
        self._run = run
        self._c = calibration
        self._kind: DeviceKind = run.kind
        self._units: dict[int, tuple[float, float, float]] = {}
        self._link = cache(lambda axis: link(run.config.grid, axis, run.kind.node))

    def stage(self, stage: int) -> StageTime:
        """Return the time of one micro-batch on one stage."""
        forward = backward = exposed = 0.0
        for chunk in self._run.stages.on(stage):
            units = units_of(self._run.costs, chunk)
            again = self._recomputed(units)
            for number, unit in enumerate(units):
                f, b, x = self.unit(unit)
                forward += f
                backward += b + (f if number in again else 0.0)
                exposed += x
        return StageTime(forward, backward, exposed)

    def unit(self, unit: UnitCost) -> tuple[float, float, float]:
        """Return the times (forward, backward, exposed communication in both) of a unit."""
        if id(unit) not in self._units:
            forward = backward = exposed = 0.0
            selective = self._run.view.selective_recompute
            for operator in unit.operators:
                products, others = self._products(operator.products), self._others(operator)
                shown = {phase: self._shown(operator, phase, products) for phase in ("forward", "backward")}
                forward += products + others + operator.scores / self._rate(self._c.scores) + shown["forward"]
                backward += 2 * products + 2 * others + 2.5 * operator.scores / self._rate(self._c.scores)
                backward += shown["backward"]
                forward += self._products(product for phase, product in operator.extra if phase == "forward")
                backward += self._products(product for phase, product in operator.extra if phase == "backward")
                if selective and operator.name in ("core", "activation"):  # recomputed
                    backward += others + operator.scores / self._rate(self._c.scores)
                if operator.recomputed:
                    backward += products + others + operator.scores / self._rate(self._c.scores)
                exposed += sum(shown.values())
            self._units[id(unit)] = forward, backward, exposed
        return self._units[id(unit)]

    def hop(self) -> float:
        """Return the time of one message between two stages."""
        run = self._run
        if run.config.grid.pp == 1:
            return 0.0
        size = run.view.item_bytes * run.view.local_tokens * run.sizes.hidden_size
        return self.seconds(CommCost("pp", "send", size, "forward"))

    def step_end(self, stage: int, time: StageTime) -> tuple[float, float]:
        """Return the times (exposed reductions and gathers, optimizer) at the end of a step on a stage."""
        run = self._run
        sent = stage_traffic(run, stage)
        reduce = gather = 0.0
        for name, size in sent.items():
            axis, kind = name.split("/")
            if axis.removeprefix("expert_") not in ("shard", "replica"):
                continue
            seconds = self.seconds(CommCost(axis, kind, size, "backward"))
            gather += seconds if kind == "all_gather" else 0.0
            reduce += 0.0 if kind == "all_gather" else seconds
        sharding, m = run.config.sharding, run.micro_batches
        # Reductions hide under the backward of the last micro-batch or of all; gathers hide under forwards.
        often = m if sharding.gradient_merge_mode == "micro_batch" else 1
        window = time.backward * often if sharding.overlap_grad_reduce != "off" else 0.0
        ahead = time.forward * (m if sharding.sharding_stage == 3 else 1)
        ahead = ahead if sharding.overlap_param_gather != "off" else 0.0
        c = self._c.shown / 2
        shown = max(reduce - window, c * reduce) + max(gather - ahead, c * gather)
        rows = sum(run.row_numel(row) for row in run.held(stage) if row.trainable)
        return shown, rows * 7 * run.view.wide_bytes / (self._kind.memory_bandwidth * self._c.memory)

    def seconds(self, message: CommCost) -> float:
        """Return the time of a collective without overlap."""
        group: Link = self._link(message.axis)
        if group.ranks == 1 or not message.bytes:
            return 0.0
        outside = group.outside(message.kind)
        inside, between = self._kind.inside * self._c.inside, self._kind.between * self._c.between
        latency = self._kind.device_class.latency_seconds
        if group.nodes == 1:
            return message.bytes / inside + latency
        return max(message.bytes * (1 - outside) / inside, message.bytes * outside / between) + 2 * latency

    def _recomputed(self, units: list[UnitCost]) -> set[int]:
        """Return the indices of the units that are recomputed."""
        layers = [place for place, unit in enumerate(units) if unit.is_layer]
        spans = self._run.recompute_spans(len(layers))
        return {place for span in spans if span.recomputed for place in layers[span.start : span.stop]}

    def _rate(self, share: float) -> float:
        return self._kind.peak(self._run.dtype) * share

    def _products(self, products: Iterable[Product]) -> float:
        """Return the time of matrix products."""
        total = 0.0
        for product in products:
            least = min(product.rows / product.groups, product.inner, product.columns)
            fp8 = self._run.assumed.fp8
            narrow = "fp8" in self._kind.flops and (fp8 == "all" or (fp8 == "mlp" and product.mlp))
            peak = self._kind.peak("fp8") * self._c.fp8 if narrow else self._rate(self._c.product)
            total += product.flops * (1 + self._c.small / max(1.0, least)) / peak
        return total

    def _others(self, operator: OpCost) -> float:
        return operator.moved / (self._kind.memory_bandwidth * self._c.memory)

    def _shown(self, operator: OpCost, phase: str, products: float) -> float:
        """Return the time of an operator's exposed communication."""
        run = self._run
        total = 0.0
        cover = products * (1 if phase == "forward" else 2)
        for message in operator.sent:
            if message.phase != phase:
                continue
            seconds = self.seconds(message)
            if message.hidden and (message.axis != "mp" or run.hiding != OFF):
                left = max(seconds - cover, self._c.shown * seconds)
                cover = max(0.0, cover - seconds)
                total += left
            elif message.axis == "ep" and (run.assumed.dualpipe or run.config.ampipe.ampipe_degree > 1):
                degree = run.config.ampipe.ampipe_degree
                share = self._c.shown if run.assumed.dualpipe else max(self._c.shown, 1 / (2 * degree))
                total += seconds * share
            else:
                total += seconds
        return total
