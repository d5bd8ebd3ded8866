"""Launch budget of a configuration: GPU kernels per layer of each kind, and host waits per step.

    python -m scripts.tracing.budget moe --config configs/tiny.yaml [--json] [FLAGS]

The real trainer steps on fake tensors of torch's "meta" device, which represents a GPU (``gpu.py``): operators take
their GPU implementations, and the copies and waits of the host are visible. ``kernels.py`` defines the kernels per
operator. The cost of a layer is the difference between two depths of a short model with the same widths and layout,
without a pipeline and with one micro-batch, because it does not depend on the number of layers. Host waits are those of
the last rank, with its pipeline, counted in short models with few micro-batches and extrapolated to all layers and
micro-batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from megapar.arguments import Config, parse
from megapar.planning.devices import device_kind
from megapar.planning.planned_run import PlannedRun
from megapar.tools.tracing.pretend import pretend
from megapar.tools.tracing.trace import traceable
from megapar.training.building.partition import effective_schedule, make_stages
from scripts.tracing.gpu import FakeGpu, as_on_a_gpu
from scripts.tracing.tally import Sums, Tally, WaitTally

DENSE, EXPERTS = "dense", "moe"
DEVICE = "h100-80g"  # whose dispatch of experts is planned
FULL = 3  # the sharding stage that also shards parameters
Depth = Mapping[str, int]  # kind -> layers
_MAKERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


@dataclass(frozen=True)
class LayerBudget:
    """Cost of one layer and micro-batch on one rank: forward, backward, its reductions and its optimizer step.

    Attributes:
        launches: Number of kernels.
        products: Number of matrix products (GEMMs) among them.
        smallest_product_rows: Rows of the smallest product, summed over its batches.
        bytes_outside_products: Bytes read and written by kernels other than products, attention and messages.
    """

    launches: int
    products: int
    smallest_product_rows: int
    bytes_outside_products: int

    def describe(self) -> str:
        """Return a short description."""
        return (
            f"{self.launches} kernels, {self.products} of them products (the smallest of "
            f"{self.smallest_product_rows:,} rows), {self.bytes_outside_products / 1e9:.2f} GB outside products"
        )


@dataclass(frozen=True)
class Budget:
    """Launch budget of a run.

    Attributes:
        layers: Cost per kind of layer, "dense" and "moe", for the kinds that the model has.
        host_waits: Host waits per step on the last rank.
    """

    layers: Mapping[str, LayerBudget]
    host_waits: int

    def to_dict(self) -> dict[str, Any]:
        """Return the budget as a dictionary."""
        return {"layers": {kind: asdict(layer) for kind, layer in self.layers.items()}, "host_waits": self.host_waits}

    def describe(self) -> str:
        """Return a line per kind of layer and one for the waits."""
        lines = [f"a layer ({kind}) on a GPU: {layer.describe()}" for kind, layer in self.layers.items()]
        return "\n".join([*lines, f"the host waits {self.host_waits} times in a step"])


def budget(config: Config) -> Budget:
    """Return the budget of the last rank of the configuration's world. Raises ConfigError if it cannot be traced."""
    depth, alone = _depth(config), _alone(config)
    step = max(1, config.recompute.recompute_interval)  # add whole recompute units
    base = {kind: 1 for kind, layers in depth.items() if layers}
    once, more = _deeper(alone, base, step)
    layers = {kind: _layer(sums.without(once), step) for kind, sums in more.items()}
    if config.sharding.sharding_stage == FULL:
        # FSDP2 never waits, and copies are not visible on fake CPU tensors: take the waits of stage 2.
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
    """Return (sums of a step with ``base`` layers, sums with ``step`` more layers of each kind)."""
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
    """Return the waits of the last stage, extrapolated from a pipeline with one layer per chunk."""
    pp, chunks = config.grid.pp, config.grid.pp * config.pipeline.vpp_degree
    # Trace as many micro-batches as stages; for schedules that interleave or split, trace whole rounds.
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
    here[kind] -= config.pipeline.vpp_degree  # traced already
    return round(total + count * sum(here[kind] * each for kind, each in waits.items()))


def _depth(config: Config, *, last_stage: bool = False) -> dict[str, int]:
    """Return the number of layers of each kind, without the branches of ERNIE 3.0.

    Args:
        last_stage: Count only the layers of the last stage.
    """
    numbers, moe = set(range(config.model.num_layers)), set(config.model.moe_layers)
    if last_stage:
        chunks = make_stages(config, config.model).chunks
        numbers &= {layer for chunk in chunks if chunk.rank == config.grid.pp - 1 for layer in chunk.layers}
    return {DENSE: len(numbers - moe), EXPERTS: len(numbers & moe)}


def _alone(config: Config) -> Config:
    """Return the configuration with a single pipeline stage that has all layers."""
    return replace(
        config,
        grid=replace(config.grid, pp=1),
        parallel=replace(config.parallel, pp_degree=1),
        pipeline=replace(
            config.pipeline, pp_seg_method="uniform", pp_schedule="1f1b", vpp_degree=1, use_nanopipe=False
        ),
    )


def _short(config: Config, depth: Depth, micro_batches: int) -> Config:
    """Return the configuration with the given numbers of layers and micro-batches."""
    dense, experts = depth.get(DENSE, 0), depth.get(EXPERTS, 0)
    units = config.recompute.recompute_num_layers
    samples = config.training.micro_batch_size * config.grid.dp * config.grid.sharding * micro_batches
    segments = config.sharding
    if segments.segment_anchors:  # they may name layers that the short model does not have
        segments = replace(segments, sharding_segment_strategy=None, segment_anchors=())
    return replace(
        config,
        model=config.model.with_layers(dense, experts),
        recompute=replace(config.recompute, recompute_num_layers=units and min(units, dense + experts)),
        sharding=replace(segments, gradient_merge_acc_step=micro_batches),
        training=replace(config.training, global_batch_size=samples),
    )


def _traced(config: Config) -> Sums:
    """Return the sums of the second step of the last rank."""
    rank = config.grid.world_size - 1
    config = traceable(config, rank)
    kind = "cpu" if config.sharding.sharding_stage == FULL else "meta"
    device = FakeGpu(torch.device(kind))
    tally = Tally(kind, device.locked)
    with ExitStack() as stack:
        for context in (as_on_a_gpu(device), _NumbersCopied(tally)):
            stack.enter_context(context)
        trainer = stack.enter_context(pretend(config, rank, tally, device, WaitTally(tally), padded=False))
        trainer.step()  # the first step allocates buffers
        tally.sums = Sums()
        trainer.step()
    return tally.sums


class _NumbersCopied(TorchFunctionMode):
    """Counts copies of Python numbers to a GPU, which the host waits for and which no operator on "meta" shows.

    A tensor that is made of numbers is one, and a write of a number to one element of a tensor.
    """

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function and count a wait if it copies numbers."""
        result = func(*args, **(kwargs or {}))
        if _made_of_numbers(func, args, result) or (func is Tensor.__setitem__ and _one_written(*args)):
            self._tally.wait()
        return result


def _made_of_numbers(func: Any, args: Sequence[Any], made: Any) -> bool:
    """Return True if a function has made a tensor on the device of Python numbers."""
    data = args[1:] if func is Tensor.new_tensor else args
    is_maker = func in _MAKERS and not any(isinstance(x, Tensor) for x in data)
    return is_maker and isinstance(made, Tensor) and made.device.type == "meta"


def _one_written(tensor: Tensor, index: Any, value: Any) -> bool:
    """Return True if an assignment writes a number to one element of a tensor on the device."""
    places = index if isinstance(index, tuple) else (index,)
    on_device = isinstance(tensor, FakeTensor) and tensor.device.type == "meta"
    numbers = sum(isinstance(one, int) for one in places)
    return on_device and isinstance(value, (int, float)) and numbers == tensor.dim()


def main(argv: Sequence[str]) -> int:
    """Print the budget of a trainer's flags, as JSON with ``--json``. Return 0."""
    kind, *flags = (word for word in argv if word != "--json")
    config = parse(kind, [*flags, "--rules-only"], {}, planning=True)
    found = budget(PlannedRun(config, device_kind(DEVICE)).settled)
    print(json.dumps(found.to_dict()) if "--json" in argv else found.describe())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
