"""Kernels of gradients against torch's operators and against formulas in fp64, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.device.triton_operators import KERNELS
from tests.support.interpreted import run_interpreted

DTYPES = (torch.float32, torch.bfloat16)


@given(
    pieces=st.integers(0, 3),
    length=st.one_of(st.integers(0, 40), st.integers(4094, 4099)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    begins=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def check(pieces, length, dtype, begins, seed):
    """To the last bit, where the pieces lie apart, and nothing beside them."""
    random = torch.Generator().manual_seed(seed)
    row, gradient = torch.randn(pieces, length + 5, generator=random), torch.randn(pieces, length, generator=random)
    gradient = gradient.to(dtype)
    wanted = row.clone()
    target = wanted[:, 2 : 2 + length]
    if begins:
        target.copy_(gradient)
    else:
        target.add_(gradient)
    KERNELS["add_gradient"](row[:, 2 : 2 + length], gradient, begins)
    assert torch.equal(row, wanted)


def close(got, wanted):
    """Within the roundings of the dtype, each of the largest element; the interpreter rounds towards zero."""
    bound = (2**-6 if got.dtype == torch.bfloat16 else 1e-5) * float(wanted.abs().max()) + 1e-6
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=bound)


def repeated(name, *arguments):
    """What two runs compute, to the last bit."""
    got, again = (KERNELS[name](*arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return got


@given(rows=st.integers(0, 70), width=st.integers(1, 140), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def check_gelu(rows, width, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    gradient, x = torch.randn(2, rows, width, generator=random).mul(2).to(dtype)
    exact = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(F.gelu(exact), exact, gradient.double())
    dx, of_bias = repeated("gelu_backward", gradient, x)
    assert dx.dtype == dtype
    if rows:
        close(dx, wanted)
    close(of_bias, dx.double().sum(0))  # of what is sent on, as the layer before would sum it


@given(
    rows=st.integers(0, 70),
    width=st.integers(2, 140),
    dropped=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def check_norm(rows, width, dropped, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    gradient, x = torch.randn(2, rows, width, generator=random).to(dtype)
    weight, bias = torch.randn(2, width, generator=random).to(dtype)
    kept = torch.rand(rows, width, generator=random) < 0.5 if dropped else None
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = F.layer_norm(exact, (width,), exact_weight, bias.double(), 1e-2)
    wanted, of_weight = torch.autograd.grad(y, (exact, exact_weight), gradient.double())
    mean, variance = exact.detach().mean(1, keepdim=True), exact.detach().var(1, keepdim=True, correction=0)
    statistics = mean.float(), (variance + 1e-2).rsqrt().float()
    dx, of_output, got = repeated("norm_backward", gradient, x, *statistics, weight, kept, 2.0)
    if not rows:
        assert not got.any()
        return
    sent = dx.double()
    if kept is not None:
        sent = sent * 2 * kept
        close(of_output, sent)
    close(dx, wanted)
    for one, other in zip(got, (of_weight, gradient.double().sum(0), sent.sum(0)), strict=True):
        close(one, other)


@pytest.mark.parametrize("name", ["check", "check_gelu", "check_norm"])
def test_gradients_are_those_of_torch(name):
    run_interpreted(__file__, name)
