"""Swiglu's kernels against the formula in fp64, run by Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.device.layer_ops import clamped_swiglu_reference, swiglu_reference
from megapar.core.device.triton_operators import KERNELS
from tests.support.interpreted import run_interpreted

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-5}  # four roundings; the interpreter rounds towards zero


@given(
    rows=st.integers(0, 5),
    features=st.one_of(st.integers(1, 40), st.integers(1020, 1030)),
    weighed=st.booleans(),
    clamped=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def check(rows, features, weighed, clamped, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    given_rows = torch.randn(rows, 2 * features, generator=random).mul(4).to(dtype)
    weights = torch.rand(rows, generator=random).to(dtype).float() if weighed else None
    exact = given_rows.double().requires_grad_()
    exact_weights = None if weights is None else weights.double()[:, None].requires_grad_()
    expected = (clamped_swiglu_reference if clamped else swiglu_reference)(
        exact.unflatten(1, (2, features)), exact_weights
    )
    tolerance = TOLERANCE[dtype]
    result = KERNELS["swiglu"](given_rows, weights, clamped)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected.detach(), rtol=tolerance, atol=1e-6)
    gradient = torch.randn(rows, features, generator=random).to(dtype)
    leaves = [exact] if exact_weights is None else [exact, exact_weights]
    wanted = torch.autograd.grad(expected, leaves, gradient.double())
    d_rows, d_weights = KERNELS["swiglu_backward"](gradient, given_rows, weights, clamped)
    assert d_rows.dtype == dtype
    torch.testing.assert_close(d_rows.double(), wanted[0], rtol=tolerance, atol=1e-5)
    if weights is None:
        assert d_weights.shape == (0,)
    else:
        assert d_weights.dtype == torch.float32
        error = (d_weights.double() - wanted[1][:, 0]).abs()
        scale = (gradient.double() * expected.detach() / exact_weights.detach().clamp(min=1e-30)).abs().sum(1)
        assert (error <= tolerance * scale + 1e-12).all()


def test_results_and_gradients_are_those_of_the_formula():
    run_interpreted(__file__)
