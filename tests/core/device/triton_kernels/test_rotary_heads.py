"""Kernels that rotate and split heads against the operators that they replace, run by Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.device.rotary import rotary_reference
from megapar.core.device.triton_operators import KERNELS
from megapar.model.attention.grouped_query_layer import split_heads
from tests.support.interpreted import run_interpreted

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # the interpreter rounds towards zero


@given(
    shape=st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    half=st.integers(1, 20),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    seed=st.integers(0, 99),
)
@settings(max_examples=6, deadline=None)
def check(shape, half, dtype, seed):
    samples, length, groups, queries = shape
    random = torch.Generator().manual_seed(seed)
    qkv = torch.randn(samples, length, groups, queries + 2, 2 * half, generator=random).to(dtype)
    angles = torch.randn(1 if seed % 2 else samples, length, half, generator=random)
    cos, sin = (x.expand(samples, -1, -1) for x in (angles.cos(), angles.sin()))
    exact = qkv.double().requires_grad_()
    q, k, v = split_heads(exact)
    expected = [rotary_reference(x, cos.double(), sin.double()) for x in (q, k)] + [v]
    heads = KERNELS["rotary_heads"](qkv, cos, sin)
    for got, wanted in zip(heads, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    grads = [torch.randn(x.shape, generator=random).to(dtype) for x in expected]
    (wanted,) = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    got = KERNELS["rotary_heads_backward"](*grads, cos, sin)
    torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_heads_and_their_gradients_are_those_of_the_operators():
    run_interpreted(__file__)
