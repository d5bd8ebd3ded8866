"""Experts on a device without a kernel for all their products: the host reads how many rows each has once, or knows."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.base import Device
from megapar.core.recompute.replay import Replay
from megapar.core.tensor_parallel.execution import Execution
from megapar.moe.layer import MoeLayer
from megapar.moe.sizes import MoeSizes
from megapar.moe.slicing import Slicing
from tests.moe.test_forward import through
from tests.support.ranks import run_ranks

HIDDEN, FFN, EXPERTS = 16, 24, 4
EVEN = {"kind": "deepspeed_moe", "capacity_scope": "rank"}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class WithoutKernel(Device):
    """As a GPU of another generation: torch's grouped product would ask for the counts each time."""

    def grouped_lacks(self, dtype, widths):
        """It has none."""
        return "this device has none"


class Seen(TorchDispatchMode):
    """Counts grouped products."""

    def __init__(self):
        super().__init__()
        self.grouped = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.grouped += "grouped_mm" in str(func)
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    """Counts values that products bring to the host."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu):
            self.values += sys._getframe(1).f_code.co_filename.endswith("grouped.py")
        return func(*args, **(kwargs or {}))


def run(layer, slicing, x, upstream):
    """(output and gradients, grouped products, what products brought to the host, the layer's waits)"""
    x, before = x.clone().requires_grad_(), layer.comm.host_waits
    with Seen() as seen, Asked() as asked:
        y, _ = through(layer, slicing, x, None) if slicing.active else layer(x)
        y.backward(upstream)
    tensors = [y.detach(), x.grad, *(parameter.grad for parameter in layer.experts.parameters())]
    layer.zero_grad()
    return tensors, seen.grouped, asked.values, layer.comm.host_waits - before


def pair(dtype, ep=None, **sizes):
    """The same layer on a device that has the kernel and on one that has not."""
    moe = MoeSizes(HIDDEN, FFN, EXPERTS, 2, min_capacity=1, **sizes)
    torch.manual_seed(5)
    layers = [
        MoeLayer(moe, ep=ep, execution=Execution(comm=CommContext(device=device)), dtype=dtype)
        for device in (Device(), WithoutKernel())
    ]
    for one, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        nn.init.normal_(one, std=0.3)
        other.data.copy_(one.data)
    x, upstream = (torch.randn(2, 12, HIDDEN).to(dtype) for _ in range(2))
    return layers, x, upstream


def compare(rank, world_size, dtype, slicing, sizes):
    """What the layer without the kernel asked for."""
    ep = Axis("ep", world_size, rank, dist.group.WORLD, tuple(range(world_size))) if world_size > 1 else None
    layers, x, upstream = pair(dtype, ep, **sizes)
    (wanted, with_kernel, *_), (got, *asked) = (run(layer, slicing, x, upstream) for layer in layers)
    assert with_kernel == 6 * (slicing.degree if slicing.active else 1)
    for mine, want in zip(got, wanted, strict=True):
        assert mine.dtype == want.dtype
        error = float((mine.double() - want.double()).norm() / want.double().norm().clamp(min=1e-6))
        assert error <= TOLERANCES[dtype], error
    return asked


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_on_one_rank_the_counts_are_read_once(dtype):
    """For six products, forward and backward."""
    assert compare(0, 1, dtype, Slicing(), {}) == [0, 0, 1]


CASES = {
    "uneven": (Slicing(), {}, 1),
    "even": (Slicing(), EVEN, 0),
    "slices": (Slicing(3), {}, 3),
    "even slices": (Slicing(3, capacity="slice"), EVEN, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_on_many_ranks_the_host_knows_them(case):
    """Splits are there already: nothing is read for the products."""
    slicing, sizes, waits = CASES[case]
    for asked in run_ranks(2, compare, torch.float32, slicing, sizes):
        assert asked == [0, 0, waits]


def test_a_recomputed_layer_reads_nothing_again():
    (_, layer), x, upstream = pair(torch.float32)
    x = x.requires_grad_()
    replay = Replay()
    layer(x, replay=replay)[0].backward(upstream)
    replay.start()
    with Seen() as seen:
        layer(x, replay=replay)[0].backward(upstream)
    assert (seen.grouped, layer.comm.host_waits) == (0, 1)
