"""Orthogonalization against a few lines, torch's Muon and singular values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megapar.core.optimizer.matrix_plan import flops
from megapar.core.optimizer.muon import COEFFICIENTS, SCALES, orthogonalize

SIMPLE = COEFFICIENTS["simple"]


def by_hand(g: Tensor, coefficients: tuple[tuple[float, float, float], ...], steps: int) -> Tensor:
    x = g / g.norm()
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


def alone(x: Tensor, coefficients: tuple[tuple[float, float, float], ...], steps: int) -> Tensor:
    return orthogonalize(x[None], coefficients, steps)[0]


@pytest.mark.parametrize("steps", [1, 5, 9])
@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16), (1, 7)])
def test_iterations_are_those_of_the_polynomials(shape: tuple[int, int], kind: str, steps: int) -> None:
    x = torch.randn(3, *shape, dtype=torch.float64)
    want = torch.stack([by_hand(each, COEFFICIENTS[kind], steps) for each in x])
    torch.testing.assert_close(orthogonalize(x, COEFFICIENTS[kind], steps), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_singular_values_end_near_one(kind: str) -> None:
    x = torch.randn(48, 32, dtype=torch.float64)
    made = alone(x, COEFFICIENTS[kind], 8 if kind == "polar_express" else 5)
    values = torch.linalg.svdvals(made)
    assert 0.4 < values.min() <= values.max() < 1.3
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert (made * (u @ v)).sum() / made.norm() / (u @ v).norm() > 0.97  # the same singular vectors


@pytest.mark.parametrize(
    ("dtype", "least", "tolerance"),
    [(torch.float64, 1e-6, 1e-12), (torch.float32, 1e-6, 1e-4), (torch.bfloat16, 0.3, 0.2)],
)
@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_only_singular_values_change_each_by_the_polynomials(
    shape: tuple[int, int], kind: str, dtype: torch.dtype, least: float, tolerance: float
) -> None:
    """The least are still growing when the steps end, but for bf16, whose roundings would grow with them."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(drawn, full_matrices=False)
    x = (u * torch.logspace(0, math.log10(least), 32, dtype=torch.float64) @ v).to(dtype)
    u, values, v = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for step in range(5):
        a, b, c = COEFFICIENTS[kind][min(step, len(COEFFICIENTS[kind]) - 1)]
        values = a * values + b * values**3 + c * values**5
    error = alone(x, COEFFICIENTS[kind], 5).double() - u * values @ v
    assert torch.linalg.matrix_norm(error, 2) < tolerance


def test_zero_stays_zero_and_almost_nothing_stays_small() -> None:
    assert not orthogonalize(torch.zeros(2, 5, 3), SIMPLE, 5).any()
    assert alone(torch.randn(48, 32, dtype=torch.float64) * 1e-19, SIMPLE, 5).abs().max() < 1e-8


def test_pieces_alone_are_another_update() -> None:
    x = torch.randn(64, 48, dtype=torch.float64)
    whole = alone(x, SIMPLE, 5)
    apart = torch.cat([alone(piece, SIMPLE, 5) for piece in x.chunk(2)])
    assert (apart - whole).norm() / whole.norm() > 0.1


class _WithoutRounding(TorchFunctionMode):
    """Takes away torch.optim.Muon's cast to bf16."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return args[0].clone() if function is Tensor.bfloat16 else function(*args, **(kwargs or {}))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(48, 40), (40, 48)])
def test_steps_are_those_of_torchs_muon(shape: tuple[int, int], nesterov: bool) -> None:
    weight = torch.randn(shape, dtype=torch.float64)
    theirs, momentum = nn.Parameter(weight.clone()), torch.zeros_like(weight)
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, nesterov=nesterov)
    for _ in range(20):
        gradient = torch.randn(shape, dtype=torch.float64)
        theirs.grad = gradient.clone()
        with _WithoutRounding():
            optimizer.step()
        momentum.lerp_(gradient, 0.05)
        update = alone(gradient.lerp(momentum, 0.95) if nesterov else momentum, SIMPLE, 5)
        weight.mul_(1 - 0.02 * 0.1).sub_(0.02 * SCALES["shape_scaling"](*shape) * update)
    torch.testing.assert_close(theirs.detach(), weight, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "tall", "wide"), [("spectral", 8, 8), ("unit_rms_norm", 2, 0.5), ("shape_scaling", 2, 1)]
)
def test_scales_of_shapes(kind: str, tall: float, wide: float) -> None:
    assert [SCALES[kind](64, 16), SCALES[kind](16, 64)] == [tall, wide]


def test_operations_are_those_of_the_products() -> None:
    assert flops(3, 7, 5) == flops(7, 3, 5) == 5 * (2 * 3 * 7 * 3 + 2 * 3**3 + 2 * 3 * 3 * 7)
