"""Count the operators of a training step on a GPU, in order, without one: run by ``scripts/with_fake_cuda.sh``.

Prints a line of JSON per layer, a ``Counted``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_model.model import DEPTHS, Counted, Gemm, Operation
from megapar.arguments import parse
from megapar.model.cost.rank_view import RankView
from megapar.model.flops import step_flops
from megapar.model.spec import spec_of
from megapar.tools.tracing.tally import Sums
from scripts.fake_cuda import stand_in
from scripts.trace_cuda import Tracer, Watch
from scripts.trace_cuda_budgets import LAYERS, WAITS, Run

GATHERING = ("index", "embedding", "_embedding_bag", "scatter", "gather")
# Collective -> times that the other ranks' share of its largest tensor is sent (megapar/core/comm/collectives.py).
MESSAGES = {"alltoall_base_": 1, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 2}
FLASH_BACKWARD = 2.5  # in forwards: five products of the scores' size instead of two


class Recorder(Watch):
    """Watch that keeps every operator with its work. ``scores``: FLOPs of one forward of attention."""

    scores = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.operations: list[Operation] = []

    def clear(self) -> None:
        """Forget the operators too."""
        super().clear()
        self.operations = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the operator. Waits that an observer counted since the last one are its own, but for those in ``WAITS``.

        They are for results of the previous step, which are complete.
        """
        result = super().__torch_dispatch__(func, types, args, kwargs)
        own, self.sums = self.sums, Sums()
        if own.kernels or own.waits:
            self.operations.append(self._operation(func._schema.name, own, args, result))
        return result

    def _operation(self, name: str, own: Sums, args: Any, result: Any) -> Operation:
        operator, label = next(iter(own.kernels), (name, "host"))
        moved = own.bytes_outside_products
        gathers = operator.startswith(GATHERING)
        scores = self.scores if "attention" in operator and "forward" not in operator else 0.0
        return Operation(
            f"{operator} in {label}",
            own.launches,
            0.0 if gathers else moved,
            moved if gathers else 0.0,
            tuple(_gemm(product.work, args, result) for product, _ in own.products),
            scores * (FLASH_BACKWARD if "backward" in operator else 1.0),
            operator if operator in MESSAGES else "",
            _sent(operator, args),
            bool(own.unaligned),
            sum(times for where, times in own.waits.items() if where not in WAITS),
        )


def _gemm(work: float, args: Any, result: Tensor) -> Gemm:
    """Return a product's shape. Of a grouped product either the result or the right factor has the groups."""
    batched = (x.shape[0] for x in (result, *tree_leaves(args)) if isinstance(x, Tensor) and x.dim() == 3)
    rows, columns = result.numel() // result.shape[-1], result.shape[-1]
    return Gemm(rows, columns, work / (rows * columns), next(batched, 1))


def _sent(operator: str, args: Any) -> float:
    """Return the bytes that a collective sends to other ranks."""
    if operator not in MESSAGES:
        return 0.0
    groups = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
    size = dist.ProcessGroup.unbox(groups[0]).size() if groups else 1
    largest = max((x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)), default=0)
    return MESSAGES[operator] * largest * (size - 1) / size


def count(tracer: Tracer, run: Run) -> Counted:
    """Return the operators of a run at both depths."""
    flops, sequences = [], []
    for layers in DEPTHS:
        more = f"--num-layers {layers}"
        config = parse(run.model, [*run.flags.split(), *more.split()], {"WORLD_SIZE": str(run.world), "RANK": "0"})
        sizes, grid = config.model, config.grid
        samples = config.training.global_batch_size // (grid.dp * grid.sharding)
        flops.append(step_flops(sizes, samples, sizes.seq_length) / grid.mp)
        attention = spec_of(sizes).costs(sizes, RankView.alone(sizes.seq_length)).attention
        Recorder.scores = samples * sum(operator.scores for operator in attention) / grid.mp
        watch = tracer.trace(run, more, Recorder)
        assert isinstance(watch, Recorder)
        sequences.append(tuple(watch.operations))
    layer = flops[1] - flops[0]
    return Counted(run.name, *sequences, layer, flops[0] - DEPTHS[0] * layer)


def main(argv: Sequence[str]) -> None:
    """Count the layers of these names."""
    stand_in()
    tracer = Tracer()
    for name in argv:
        run = next(run for run in LAYERS if run.name == name)
        print(json.dumps(asdict(count(tracer, run))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
