"""``megapar plan --launches``: what one more layer of each kind asks of a GPU, and how often the host waits in a step.

The real trainer steps on fake tensors of torch's "meta" device, which stands for a GPU (``gpu.py``): the operator
table's forms are a GPU's, and what the host copies or waits for is seen. Kernels are those of ``kernels.py``. A layer
is the difference between two depths of a short model of the same widths and layout, without a pipeline and in one
micro-batch: what it asks does not depend on how many there are. Waits are those of the last rank, with its pipeline,
counted in short models of few micro-batches and drawn out to all layers and micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from megapar.arguments import Config
from megapar.tools.tracing.gpu import FakeGpu, as_on_a_gpu
from megapar.tools.tracing.pretend import pretend
from megapar.tools.tracing.tally import Sums, Tally, WaitTally
from megapar.tools.tracing.trace import traceable
from megapar.training.building.stages import effective_schedule, make_stages

DENSE, EXPERTS = "dense", "moe"
FULL = 3  # the stage that cuts parameters, too
Depth = Mapping[str, int]  # kind -> layers


@dataclass(frozen=True)
class LayerBudget:
    """Of one layer and micro-batch on one rank: forward, backward, and its share of the reductions and the optimizer.

    launches: kernels. products: those of them that multiply matrices. smallest_product_rows: of the smallest, all its
    batches together. bytes_outside_products: read and written by kernels that are neither product, attention nor
    message.
    """

    launches: int
    products: int
    smallest_product_rows: int
    bytes_outside_products: int

    def describe(self) -> str:
        """A few words."""
        return (
            f"{self.launches} kernels, {self.products} of them products (the smallest of "
            f"{self.smallest_product_rows:,} rows), {self.bytes_outside_products / 1e9:.2f} GB outside products"
        )


@dataclass(frozen=True)
class Budget:
    """layers: "dense" and "moe", those that the model has. host_waits: of a step of the last rank."""

    layers: Mapping[str, LayerBudget]
    host_waits: int

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"layers": {kind: asdict(layer) for kind, layer in self.layers.items()}, "host_waits": self.host_waits}

    def describe(self) -> str:
        """A line for each kind of layer, and one for the waits."""
        lines = [f"a layer ({kind}) on a GPU: {layer.describe()}" for kind, layer in self.layers.items()]
        return "\n".join([*lines, f"the host waits {self.host_waits} times in a step"])


def budget(config: Config) -> Budget:
    """Of the last rank of the configuration's world. Raises ConfigError for what cannot be traced."""
    depth, alone = _depth(config), _alone(config)
    step = max(1, config.recompute.recompute_interval)  # layers that are one recomputed unit come together
    base = {kind: 1 for kind, layers in depth.items() if layers}
    once, more = _deeper(alone, base, step)
    layers = {kind: _layer(sums.without(once), step) for kind, sums in more.items()}
    if config.sharding.sharding_stage == FULL:
        # FSDP2 never waits, and on a CPU's fake tensors copies cannot be seen: waits are those of stage 2.
        config = replace(config, sharding=replace(config.sharding, sharding_stage=2))
        alone = _alone(config)
        once, more = _deeper(alone, base, step)
    waits = {kind: (sums.waits.total() - once.waits.total()) / step for kind, sums in more.items()}
    if config.grid.pp > 1:
        return Budget(layers, _waits_of_a_stage(config, waits))
    count = config.sharding.gradient_merge_acc_step
    first, second = once.waits.total(), _traced(_short(alone, base, 2)).waits.total()
    rest = sum((depth[kind] - base[kind]) * waits[kind] for kind in base)
    return Budget(layers, round(first + (count - 1) * (second - first) + count * rest))


def _deeper(config: Config, base: Depth, step: int) -> tuple[Sums, dict[str, Sums]]:
    """(a step of so many layers, those of ``step`` more of each kind)."""
    more = {kind: _traced(_short(config, {**base, kind: layers + step}, 1)) for kind, layers in base.items()}
    return _traced(_short(config, base, 1)), more


def _layer(sums: Sums, layers: int) -> LayerBudget:
    smallest = sums.smallest_product
    return LayerBudget(
        launches=round(sums.launches / layers),
        products=round(sums.products.total() / layers),
        smallest_product_rows=0 if smallest is None else smallest.rows,
        bytes_outside_products=round(sums.bytes_outside_products / layers),
    )


def _waits_of_a_stage(config: Config, waits: Mapping[str, float]) -> int:
    """Waits of the last stage, from a pipeline of one layer in every chunk."""
    pp, chunks = config.grid.pp, config.grid.pp * config.pipeline.vpp_degree
    # As many micro-batches as stages are wanted; where a schedule interleaves or splits, whole rounds of them.
    unit = 1 if effective_schedule(config) in ("1f1b", "gpipe") else pp
    kind = EXPERTS if _depth(config)[EXPERTS] else DENSE
    short = replace(config, pipeline=replace(config.pipeline, pp_seg_method="uniform"))
    count = config.sharding.gradient_merge_acc_step
    counts = (count,) if count <= pp + unit else (pp, pp + unit)
    found = [_traced(_short(short, {kind: chunks}, some)).waits.total() for some in counts]
    total = float(found[0])
    if len(found) > 1:
        total += (count - pp) * (found[1] - found[0]) / unit
    here = _depth(config, last_stage=True)
    here[kind] -= config.pipeline.vpp_degree  # those that were there
    return round(total + count * sum(here[kind] * each for kind, each in waits.items()))


def _depth(config: Config, *, last_stage: bool = False) -> dict[str, int]:
    """Layers of each kind; those of the last stage where that is asked for. Branches of ERNIE 3.0 do not count."""
    numbers, moe = set(range(config.model.num_layers)), set(config.model.moe_layers)
    if last_stage:
        chunks = make_stages(config, config.model).chunks
        numbers &= {layer for chunk in chunks if chunk.rank == config.grid.pp - 1 for layer in chunk.layers}
    return {DENSE: len(numbers - moe), EXPERTS: len(numbers & moe)}


def _alone(config: Config) -> Config:
    """The ranks of one stage that has all layers."""
    return replace(
        config,
        grid=replace(config.grid, pp=1),
        parallel=replace(config.parallel, pp_degree=1),
        pipeline=replace(
            config.pipeline, pp_seg_method="uniform", pp_schedule="1f1b", vpp_degree=1, use_nanopipe=False
        ),
    )


def _short(config: Config, depth: Depth, micro_batches: int) -> Config:
    """The same with so many layers and micro-batches."""
    dense, experts = depth.get(DENSE, 0), depth.get(EXPERTS, 0)
    units = config.recompute.recompute_num_layers
    samples = config.training.micro_batch_size * config.grid.dp * config.grid.sharding * micro_batches
    segments = config.sharding
    if segments.segment_anchors:  # they name layers that may not be there
        segments = replace(segments, sharding_segment_strategy=None, segment_anchors=())
    return replace(
        config,
        model=config.model.with_layers(dense, experts),
        recompute=replace(config.recompute, recompute_num_layers=units and min(units, dense + experts)),
        sharding=replace(segments, gradient_merge_acc_step=micro_batches),
        training=replace(config.training, global_batch_size=samples),
    )


def _traced(config: Config) -> Sums:
    """A second step of the last rank."""
    rank = config.grid.world_size - 1
    config = traceable(config, rank)
    kind = "cpu" if config.sharding.sharding_stage == FULL else "meta"
    device = FakeGpu(torch.device(kind))
    tally = Tally(kind, device.locked)
    with ExitStack() as stack:
        for context in (as_on_a_gpu(device), _NumbersWritten(tally)):
            stack.enter_context(context)
        trainer = stack.enter_context(pretend(config, rank, tally, device, WaitTally(tally)))
        trainer.step()  # buffers are made in the first one
        tally.sums = Sums()
        trainer.step()
    return tally.sums


class _NumbersWritten(TorchFunctionMode):
    """Notes a number that is written to one place of a tensor: on a GPU a copy from the host, which waits."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and look at what was written where."""
        if func is Tensor.__setitem__ and isinstance(args[2], (int, float)):
            tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            numbers = sum(isinstance(one, int) for one in index)
            if isinstance(tensor, FakeTensor) and tensor.device.type == "meta" and numbers == tensor.dim():
                self._tally.wait()
        return func(*args, **(kwargs or {}))
