"""Seconds of one operator's parts: matrix products, attention's core, memory-bound work, and messages on their links.

All models, devices and layouts have one calibration, which ``benchmarks/prediction`` compares with published runs; the
software adds its kernels and bytes to an operator's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from megapar.core.device.kinds import TENSORWISE
from megapar.model.cost.model_cost import CommCost, OpCost, Product
from megapar.moe.dispatch_bytes import BETWEEN, WITHIN
from megapar.moe.sizes import MoeSizes
from megapar.planning.calibration import Calibration, calibrations
from megapar.planning.planned_run import PlannedRun
from megapar.planning.traffic import Link, link

HOPS = (BETWEEN, WITHIN)  # axes of a dispatch by node
# Of --fp8 on an H100, at four shapes (docs/gpu_day.md): products relative to bf16, and bytes that a cast of bf16 moves.
FP8_RATES = {"fp8": 1.59, "fp8_experts": 1.34, TENSORWISE: 1.76}
CAST_BYTES = {"fp8": 3, "fp8_experts": 3, TENSORWISE: 5}  # the last one reads a tensor for its maximum first


class MessageTime(NamedTuple):
    """Seconds of a collective on the links that it uses at once.

    Attributes:
        inside: Seconds in which the link inside the node is busy.
        between: Seconds in which the link between nodes is busy.
        latency: Seconds in which neither is.
    """

    inside: float = 0.0
    between: float = 0.0
    latency: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from launch to end, if both links are free."""
        return max(self.inside, self.between) + self.latency


class OperatorTime:
    """Seconds that operators of a run take on its kind of device.

    Attributes:
        calibration: Shares of the data sheets' figures, and the software.
    """

    def __init__(self, run: PlannedRun, calibration: Calibration | None = None) -> None:
        self._run, self._kind = run, run.kind
        self._experts: MoeSizes | None = getattr(run.sizes, "moe", None)
        base, experts = calibration or calibrations()[run.assumed.software], self._experts is not None
        self.calibration = c = run.assumed.calibration(base, experts=experts)
        clock, fp8_clock = c.clocks.get(run.kind.name, (1.0, 1.0))
        self._rate = run.kind.peak(run.dtype) * c.product * clock
        self._fp8_rate = run.kind.flops.get("fp8", 0.0) * c.fp8 * fp8_clock
        self._scores_rate = run.kind.peak(run.dtype) * c.software.scores * clock
        self._launch = run.kind.device_class.launch_seconds * c.software.launch
        self._counts_rows = self._experts is not None and not self._experts.has_capacity and run.config.grid.ep > 1
        self._link = cache(lambda axis: link(run.config.grid, axis, run.node))

    def products(self, products: Iterable[Product], parts: float = 1, *, weight: bool = False) -> float:
        """Return the time of matrix products, or of one of ``parts`` equal parts of their rows.

        It is that of their forward and of their input gradient, or of their ``weight`` gradient.
        """
        c, total = self.calibration, 0.0
        for product in products:
            least = min(product.rows / product.groups / parts, product.inner, product.columns)
            narrow, grouped = self._narrow(product), product.groups > 1
            rate = (self._fp8_rate if narrow else self._rate) * (c.software.grouped if grouped else 1.0)
            if self._run.in_fp8(product.fp8) and not narrow and not weight:
                recipe = TENSORWISE if self._run.config.training.fp8_recipe == TENSORWISE else product.fp8
                rate *= FP8_RATES[recipe]
                cast = (product.inner + product.columns) / 2  # of the input, and of the gradient of the output
                total += self.moved(product.rows / parts * cast * CAST_BYTES[recipe])
            total += product.flops / parts * (1 + c.small / max(1.0, least)) / rate
            if narrow and (c.software.casts_groups or not grouped):
                total += self.moved(product.rows / parts * product.inner * c.software.cast)
        return total

    def scores(self, flops: float) -> float:
        """Return the time of attention's core."""
        return flops / self._scores_rate

    def rest(self, operator: OpCost) -> float:
        """Return the time of the memory-bound kernels of an operator's forward."""
        software = self.calibration.software
        size = operator.moved * software.bytes.get(operator.name, 1.0)
        if operator.name == "down" and self._experts is not None and self._experts.add_bias:
            experts = (one for one in operator.products if one.fp8 == "fp8_experts")
            size += software.expert_bias * sum(one.rows * one.columns for one in experts)
        return self.moved(size)

    def launches(self, operator: OpCost) -> tuple[float, float]:
        """Return the times that the host takes to launch an operator's forward and its backward.

        A dispatch that sends as many rows as experts have begins when the host knows them.
        """
        software = self.calibration.software
        there, back = software.launches.get(operator.name, (1.0, 2.0))
        for product in operator.products:
            if product.groups > 1:
                narrow = self._narrow(product)
                each = product.groups * (software.fp8_launches_per_expert if narrow else software.launches_per_expert)
                there, back = there + each, back + 2 * each
        if operator.name == "dispatch" and operator.sent and self._counts_rows:
            there += software.wait
        return there * self._launch, back * self._launch

    def moved(self, size: float) -> float:
        """Return the time of memory-bound work that reads and writes ``size`` bytes."""
        return size / (self._kind.memory_bandwidth * self.calibration.software.memory)

    def _narrow(self, product: Product) -> bool:
        return self._fp8_rate > 0 and self._run.assumed.narrow(product)

    def message(self, message: CommCost) -> MessageTime:
        """Return the time of a collective; of an all-to-all of rows, of the busiest expert rank."""
        group: Link = self._link(message.axis)
        if group.ranks == 1 or not message.bytes:
            return MessageTime()
        if message.axis == "ep" and message.kind == "all_to_all" and self._experts is not None:
            near, far = self._rows_sent(group, self._experts)
        else:
            rows = message.kind == "all_to_all" and message.axis in HOPS
            load = self._run.assumed.expert_imbalance if rows else 1.0
            far = group.outside(message.kind)
            near, far = load * (1 - far), load * far
        others = 1 if message.kind == "send" else group.local - 1
        inside = message.bytes * near / (self._kind.inside_to(others) * self.calibration.inside)
        between = message.bytes * far / (self._kind.between * self.calibration.between)
        latency = self._kind.device_class.latency_seconds
        return MessageTime(inside, between, latency if group.nodes == 1 else 2 * latency)

    def _rows_sent(self, group: Link, experts: MoeSizes) -> tuple[float, float]:
        """Return the bytes within and between nodes of an all-to-all of rows, relative to those of all copies.

        Under hybrid-ep a token with k copies reaches r (1 - (1 - 1/r)^k) of r ranks or nodes once if all are as likely.
        """
        far, load = group.outside("all_to_all"), self._run.assumed.expert_imbalance
        if not self._run.assumed.sends_tokens_once:
            return (1 - far) * load, far * load
        k = experts.topk

        def reached(places: int) -> float:
            return places * (1 - (1 - 1 / places) ** k)

        copies = k * (group.ranks - 1) / group.ranks  # that leave a rank
        # A token's groups of experts are taken to be whole nodes.
        nodes = min(group.nodes, experts.group_topk) if experts.groups > 1 else group.nodes
        far = reached(nodes) * (group.nodes - 1) / group.nodes / copies
        near = reached(group.ranks) * (group.local - 1) / group.local / copies
        return near * load, far * load
