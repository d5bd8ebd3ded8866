"""How long a step takes: products, attention, memory-bound operators and what communication shows, stage by stage.

One calibration for all models, devices and layouts; ``benchmarks/prediction`` holds it against published runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megapar.core.device.kinds import LINK_SHARE, DeviceKind
from megapar.core.hiding import OFF
from megapar.core.pipeline.schedule import GPIPE, ZERO_BUBBLE
from megapar.model.flops import step_flops
from megapar.planning.layout import Layout
from megapar.planning.parts import Message, Part, Unit
from megapar.planning.traffic import Link, link, stage_traffic
from megapar.planning.work import Work


@dataclass(frozen=True)
class Calibration:
    """What devices reach of their data sheets.

    product: of a large matrix product. small: a product whose least dim is this long reaches half of that. fp8: of a
    product in fp8, which casts its inputs. scores: of attention's core. memory: of the memory's bandwidth. inside,
    between: of the links. shown: the part of a message that even a product long enough does not hide. jitter: time lost
    per doubling of the ranks, to stragglers.
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
    """Seconds of one micro-batch: forward and backward with what is recomputed; exposed: of communication in it."""

    forward: float
    backward: float
    exposed: float

    @property
    def both(self) -> float:
        """One micro-batch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Speed:
    """Of one optimizer step. bubble_share: of the ranks' time in the pipeline. exposed_seconds: communication that
    nothing hides, on the slowest stage. flops: of the model, over all ranks."""

    step_seconds: float
    bubble_share: float
    exposed_seconds: float
    optimizer_seconds: float
    flops: float
    mfu: float
    tokens_per_second: float


def predict(work: Work, calibration: Calibration = CALIBRATION) -> Speed:
    """The speed of a layout."""
    layout = work.layout
    grid, m = layout.config.grid, layout.micro_batches
    clock = Clock(layout, calibration)
    times = [clock.stage(work, stage) for stage in range(grid.pp)]
    slowest = max(times, key=lambda time: time.both)
    both = sum(time.both for time in times)
    fill = (both - slowest.both) / layout.config.pipeline.vpp_degree * _fill(layout)
    messages = hops(layout) * clock.hop(work)
    pipeline = m * slowest.both + fill + messages
    reduction, optimizer = max(clock.step_end(work, stage, times[stage]) for stage in _ends(grid.pp))
    jitter = 1 + calibration.jitter * (grid.world_size.bit_length() - 1)
    seconds = (pipeline + reduction + optimizer) * jitter
    flops = model_flops(work)
    tokens = layout.config.training.global_batch_size * layout.sizes.seq_length
    return Speed(
        step_seconds=seconds,
        bubble_share=1 - m * both / grid.pp / pipeline,
        exposed_seconds=m * slowest.exposed + reduction + messages,
        optimizer_seconds=optimizer,
        flops=flops,
        mfu=flops / seconds / grid.world_size / layout.kind.peak(_peak_dtype(layout)),
        tokens_per_second=tokens / seconds,
    )


def model_flops(work: Work) -> float:
    """FLOPs of a step as utilisation is counted (``model/flops.py``); assumed attention is counted as it is."""
    layout = work.layout
    sequences, length = layout.config.training.global_batch_size, layout.sizes.seq_length
    flops = float(step_flops(layout.sizes, sequences, length))
    if layout.assumed.latent is None:
        return flops
    grid = layout.config.grid
    plain = Work(Layout(layout.config, layout.kind))

    def attention(of: Work) -> float:
        parts = of.dense.parts[:4]
        return sum(sum(product.flops for product in part.products) + part.scores for part in parts) * grid.mp

    per_layer = (attention(work) - attention(plain)) / layout.samples * grid.cp
    return flops + 3 * per_layer * layout.sizes.num_layers * sequences


def attention_flops(work: Work) -> float:
    """FLOPs of attention's core in a step, forward and backward, the causal half only."""
    grid, layout = work.layout.config.grid, work.layout
    scores = next(part.scores for part in work.dense.parts if part.name == "core") * grid.mp * grid.cp / layout.samples
    return 3 * scores * layout.sizes.num_layers * layout.config.training.global_batch_size


def _peak_dtype(layout: Layout) -> str:
    return layout.dtype


def _ends(pp: int) -> list[int]:
    return sorted({0, pp // 2, pp - 1})


def _fill(layout: Layout) -> float:
    """Of the time in which a plain pipeline fills and drains."""
    if layout.assumed.dualpipe:
        return 0.3
    return {ZERO_BUBBLE: 1 / 3, GPIPE: 1.0}.get(layout.schedule, 1.0)


def hops(layout: Layout) -> int:
    """Messages between stages that nothing hides, one after the other, in a step.

    What drawn schedules take longer when messages take time, on the queues that the runner has (``simulate``), as long
    as a message is short beside a forward: where the last stages wait for each other in turn (1F1B) some of every
    micro-batch, else those of filling and draining.
    """
    p, v, m = layout.config.grid.pp, layout.config.pipeline.vpp_degree, layout.micro_batches
    if p == 1:
        return 0
    if layout.assumed.dualpipe or layout.schedule == GPIPE:
        return 2 * (p - 1)
    if layout.schedule == ZERO_BUBBLE:
        if v == 2:  # V-shaped
            return 4 * p - 4 if m == p else 5 * p - 7
        return (v + 3) * p - (6 if m == p else 4)
    return 2 * (m + p - 3 - (m - 2) // p) if v == 1 else 2 * (v * p - 1)


class Clock:
    """Seconds of parts and messages of one layout."""

    def __init__(self, layout: Layout, calibration: Calibration) -> None:
        self._layout = layout
        self._c = calibration
        self._kind: DeviceKind = layout.kind
        self._units: dict[int, tuple[float, float, float]] = {}
        self._link = cache(lambda axis: link(layout.config.grid, axis, layout.kind.node))

    def stage(self, work: Work, stage: int) -> StageTime:
        """One micro-batch on one stage."""
        forward = backward = exposed = 0.0
        for chunk in work.layout.stages.on(stage):
            units = work.units_of(chunk)
            again = self._recomputed(units)
            for number, unit in enumerate(units):
                f, b, x = self.unit(unit)
                forward += f
                backward += b + (f if number in again else 0.0)
                exposed += x
        return StageTime(forward, backward, exposed)

    def unit(self, unit: Unit) -> tuple[float, float, float]:
        """(forward, backward, exposed communication in both) of a layer."""
        if id(unit) not in self._units:
            forward = backward = exposed = 0.0
            selective = self._layout.config.recompute.recompute_granularity == "selective"
            for part in unit.parts:
                products, others = self._products(part), self._others(part)
                shown = {phase: self._shown(part, phase, products) for phase in ("forward", "backward")}
                forward += products + others + part.scores / self._rate(self._c.scores) + shown["forward"]
                backward += 2 * products + 2 * others + 2.5 * part.scores / self._rate(self._c.scores)
                backward += shown["backward"]
                if selective and part.name in ("core", "activation"):  # computed again
                    backward += others + part.scores / self._rate(self._c.scores)
                if part.again:
                    backward += products + others + part.scores / self._rate(self._c.scores)
                exposed += sum(shown.values())
            self._units[id(unit)] = forward, backward, exposed
        return self._units[id(unit)]

    def hop(self, work: Work) -> float:
        """One message between two stages."""
        layout = self._layout
        if layout.config.grid.pp == 1:
            return 0.0
        size = layout.item * layout.own * layout.sizes.hidden_size
        return self.seconds(Message("pp", "send", size, "forward"))

    def step_end(self, work: Work, stage: int, time: StageTime) -> tuple[float, float]:
        """(reduction and gathers that nothing hides, the optimizer) of a stage."""
        layout = self._layout
        sent = stage_traffic(work, stage)
        reduce = gather = 0.0
        for name, size in sent.items():
            axis, kind = name.split("/")
            if axis.removeprefix("expert_") not in ("shard", "replica"):
                continue
            seconds = self.seconds(Message(axis, kind, size, "backward"))
            gather += seconds if kind == "all_gather" else 0.0
            reduce += 0.0 if kind == "all_gather" else seconds
        sharding, m = layout.config.sharding, layout.micro_batches
        # Under the last micro-batch's backward, or every one's, and under the forwards.
        often = m if sharding.gradient_merge_mode == "micro_batch" else 1
        window = time.backward * often if sharding.overlap_grad_reduce != "off" else 0.0
        ahead = time.forward * (m if sharding.sharding_stage == 3 else 1)
        ahead = ahead if sharding.overlap_param_gather != "off" else 0.0
        c = self._c.shown / 2
        shown = max(reduce - window, c * reduce) + max(gather - ahead, c * gather)
        rows = sum(layout.row_numel(row) for row in layout.held(stage) if row.trainable)
        return shown, rows * 7 * layout.wide / (self._kind.memory_bandwidth * self._c.memory)

    def seconds(self, message: Message) -> float:
        """A collective by itself."""
        found: Link = self._link(message.axis)
        if found.ranks == 1 or not message.bytes:
            return 0.0
        outside = found.outside(message.kind)
        inside, between = self._kind.inside * self._c.inside, self._kind.between * self._c.between
        latency = self._kind.of.latency_seconds
        if found.nodes == 1:
            return message.bytes / inside + latency
        return max(message.bytes * (1 - outside) / inside, message.bytes * outside / between) + 2 * latency

    def _recomputed(self, units: list[Unit]) -> set[int]:
        recompute = self._layout.config.recompute
        layers = [number for number, unit in enumerate(units) if unit.layer]
        if recompute.recompute_method == "block":
            return set(layers[: recompute.recompute_num_layers or 0])
        if recompute.recompute_method == "uniform" or recompute.recompute_interval:
            return set(layers)
        return set()

    def _rate(self, share: float) -> float:
        return self._kind.peak(self._layout.dtype) * share

    def _products(self, part: Part) -> float:
        """Seconds of the forward's products."""
        total = 0.0
        for product in part.products:
            least = min(product.rows / product.groups, product.inner, product.columns)
            fp8 = self._layout.assumed.fp8
            narrow = "fp8" in self._kind.flops and (fp8 == "all" or (fp8 == "mlp" and product.mlp))
            peak = self._kind.peak("fp8") * self._c.fp8 if narrow else self._rate(self._c.product)
            total += product.flops * (1 + self._c.small / max(1.0, least)) / peak
        return total

    def _others(self, part: Part) -> float:
        return part.moved / (self._kind.memory_bandwidth * self._c.memory)

    def _shown(self, part: Part, phase: str, products: float) -> float:
        """Seconds of a part's messages that are not hidden."""
        layout = self._layout
        total = 0.0
        cover = products * (1 if phase == "forward" else 2)
        for message in part.messages:
            if message.phase != phase:
                continue
            seconds = self.seconds(message)
            if message.hidden and (message.axis != "mp" or layout.hiding != OFF):
                left = max(seconds - cover, self._c.shown * seconds)
                cover = max(0.0, cover - seconds)
                total += left
            elif message.axis == "ep" and (layout.assumed.dualpipe or layout.config.ampipe.ampipe_degree > 1):
                degree = layout.config.ampipe.ampipe_degree
                share = self._c.shown if layout.assumed.dualpipe else max(self._c.shown, 1 / (2 * degree))
                total += seconds * share
            else:
                total += seconds
        return total
