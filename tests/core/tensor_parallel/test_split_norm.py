"""Norms over heads that are split over mp: outputs and gradients are those of one rank, by two small messages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.device.compiled import Compiled
from megapar.core.device.layer_ops import rms_norm_reference
from megapar.core.tensor_parallel.split_norm import SplitNorm
from tests.support.ranks import run_ranks

EPSILON = 0.1  # large enough that a wrong one shows


def drawn(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Queries [2, 3, 4, 6], keys [2, 3, 2, 6], their weights, and gradients of both outputs."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, 4, 6), (2, 3, 2, 6), (4, 6), (2, 6))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return inputs, [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes[:2]]


def expected(dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of both norms, each over a whole row."""
    inputs, grads = drawn(dtype)
    leaves = [x.requires_grad_() for x in inputs]
    outputs = [
        rms_norm_reference(x.flatten(2), weight.flatten(), EPSILON).view(x.shape)
        for x, weight in zip(leaves[:2], leaves[2:], strict=True)
    ]
    torch.autograd.backward(outputs, grads)
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def on_rank(rank: int, world_size: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, int]]:
    """Outputs and gradients of this rank's heads, and the bytes that it sent."""
    mp = Axis("mp", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    inputs, grads = drawn(dtype)
    leaves = [x.chunk(world_size, -2)[rank].requires_grad_() for x in inputs]
    outputs = SplitNorm(EPSILON, mp)(*leaves)
    torch.autograd.backward(outputs, [grad.chunk(world_size, -2)[rank] for grad in grads])
    found = [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return found, mp.sent_bytes.take()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.bfloat16, 0.02)])
def test_two_ranks_give_the_norms_of_one(dtype: torch.dtype, bound: float) -> None:
    whole = expected(torch.float64)
    for rank, (found, sent) in enumerate(run_ranks(2, on_rank, dtype)):
        assert len(found) == 6
        assert sent == {"mp/all_reduce": 2 * (2 * 3 * 2) * max(4, dtype.itemsize)}  # two numbers per position, twice
        for tensor, want in zip(found, whole, strict=True):
            part = want.chunk(2, -2)[rank]
            assert tensor.dtype == dtype
            assert float((tensor - part).abs().max()) <= bound * float(want.abs().max())


def test_compiled_functions_give_the_same() -> None:
    inputs, grads = drawn(torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    outputs = SplitNorm(EPSILON, Axis.single("mp"), Compiled("aot_eager"))(*leaves)
    torch.autograd.backward(outputs, grads)
    found = [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    for tensor, want in zip(found, expected(torch.float64), strict=True):
        assert torch.allclose(tensor, want, rtol=1e-13, atol=1e-14)
