"""A compiled layer leaves its last sum to the next layer of its unit, and the numbers stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.compiled import plain
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import Interval
from megapar.core.tensor_parallel.execution import Execution
from megapar.model.layers.residual import PendingSum
from tests.model.small import DENSE, MOE, batch_for, build, total


def stands_for_a_compiler(function, *arguments):
    return function(*arguments)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("sizes", [replace(DENSE, num_layers=4), replace(MOE, num_layers=4)], ids=["dense", "moe"])
def test_sums_between_layers_are_pending_only_where_functions_are_compiled(sizes, recomputed):
    """Never at the end of a recomputed unit, which would keep two tensors instead of one."""
    found = []
    for run in (plain, stands_for_a_compiler):
        recompute = Recompute(Interval(2), CommContext(), Axis.single("mp").sent_bytes) if recomputed else None
        model = build(sizes, dtype=torch.float64, execution=Execution(run=run), recompute=recompute)
        seen = []
        for layer in model.layers.values():
            layer.register_forward_hook(
                lambda _, inputs, output, seen=seen: seen.append(isinstance(output[0], PendingSum))
            )
        loss = total(model, batch_for(sizes, padded=True))
        first = seen[:4]
        loss.backward()
        compiled = run is not plain
        assert first == [compiled, compiled and not recomputed, compiled, False]
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)
