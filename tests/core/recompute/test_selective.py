"""Recomputed parts: bit for bit the same, and nothing of what they drop is held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.recompute.selective import recompute_in_backward, without_output

ROWS, WIDTH = 64, 32
KILOBYTES = ROWS * WIDTH * 4


def split(inner: Tensor) -> Tensor:
    """A consumer that saves several views of its input, as experts on a CPU do."""
    weights = [torch.full((WIDTH, WIDTH), 0.1 * n, requires_grad=True) for n in (1, 2, 3)]
    return torch.cat([rows @ weight for rows, weight in zip(inner.split((10, 30, 24)), weights, strict=True)])


def linear(inner: Tensor) -> Tensor:
    """A consumer that flattens its input."""
    weight = torch.full((WIDTH, WIDTH), 0.1, requires_grad=True)
    return F.linear(inner.unflatten(0, (2, -1)), weight).flatten(0, 1)


@pytest.mark.parametrize("consumer", [split, linear])
@pytest.mark.parametrize("times", [1, 2])
def test_forgotten_outputs(consumer: Callable[[Tensor], Tensor], times: int) -> None:
    """The gradient is the same, also by a second backward through the same graph."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for number in range(times):
        y = without_output(torch.sigmoid, x, consumer)
        (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(got, torch.autograd.grad(y.sum(), x)[0]), number
        (want,) = torch.autograd.grad(consumer(torch.sigmoid(x)).sum(), x)
        assert torch.equal(got, want)


def held(run: Callable[[Tensor], Tensor]) -> int:
    """Bytes beside the output, in activations of one width."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with MemoryTracker() as tracker:
        y = run(x * 1.0)
        return (tracker.bytes - y.untyped_storage().nbytes()) // KILOBYTES


def test_what_is_held() -> None:
    """Without: what tanh and sigmoid keep, and the product. Then the input and the product; then the input."""

    def activation(h: Tensor) -> Tensor:
        return h.tanh() * h.sigmoid()

    weight = torch.full((WIDTH, WIDTH), 0.1, requires_grad=True)
    assert held(lambda x: F.linear(activation(x), weight)) == 3
    assert held(lambda x: F.linear(recompute_in_backward(activation, x), weight)) == 2
    assert held(lambda x: without_output(activation, x, lambda inner: F.linear(inner, weight))) == 1


def test_without_gradients() -> None:
    """Nothing to drop."""
    with torch.no_grad():
        y = without_output(torch.sigmoid, torch.zeros(2, 3), torch.neg)
    assert y.tolist() == [[-0.5] * 3] * 2
