"""Kernels that cast to e4m3 against the reference, run by Triton's interpreter, bit for bit.

The cast itself is torch's here (``cast_as_torch``). That the hardware's is torch's, too, was measured on an H100:
"casts" in benchmarks/throughput/results/2026-11-27-h100-e425762b-day.jsonl.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.device import fp8
from megapar.core.device.triton_operators import FP8_ROWS, KERNELS
from tests.core.device.test_fp8 import ODD
from tests.support.interpreted import cast_as_torch, run_interpreted


def same(a, b):
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


@given(
    rows=st.integers(0, 40),
    blocks=st.integers(1, 3),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    odd=st.sampled_from((*ODD, 1.0)),
    seed=st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def check(rows, blocks, dtype, odd, seed):
    cast_as_torch()
    random = torch.Generator().manual_seed(seed)
    K = 128 * blocks
    x = torch.randn(rows, K + 8, generator=random).mul(2.0 ** (seed % 40 - 20)).to(dtype)[:, :K]  # rows lie apart
    if rows:
        x[rows // 2, seed] = odd
    values, scale = KERNELS["cast_rows"](x)
    wanted = fp8.cast_rows_reference(x)
    assert same(values[:rows], wanted.values)
    assert torch.equal(scale.t()[:rows], wanted.scale)
    assert len(values) % FP8_ROWS == 0
    assert not values[rows:].float().any()
    whole = torch.randn(rows, K - 40, generator=random).to(dtype)
    if rows:
        whole[rows // 2, 3] = odd
    for got, wanted in zip(KERNELS["cast_whole_rows"](whole), fp8.cast_whole_rows(whole), strict=True):
        assert same(got, wanted)
    (values, numbers), (wanted, wanted_scale) = KERNELS["cast_tensor"](whole), fp8.cast_tensor(whole)
    assert not rows or (same(values, wanted) and same(numbers[:1], wanted_scale))
    weight = torch.randn(256, K, generator=random).to(dtype)
    weight[seed, seed] = odd
    results = KERNELS["cast_weight"](weight)
    for got, wanted in zip((results[:2], results[2:]), fp8.cast_weight_reference(weight), strict=True):
        assert same(got[0], wanted.values)
        assert torch.equal(got[1], wanted.scale)


@given(
    rows=st.integers(0, 18),
    blocks=st.integers(1, 9),
    clamped=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    odd=st.sampled_from((*ODD, 1.0)),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def check_outputs(rows, blocks, clamped, dtype, odd, seed):
    """What norm and swiglu compute is the same with its cast, which is that of the stored numbers."""
    cast_as_torch()
    random = torch.Generator().manual_seed(seed)
    K = 128 * blocks
    gate_up, dy = (torch.randn(rows, width, generator=random).mul(4).to(dtype) for width in (2 * K, K))
    x, weight = torch.randn(rows, K, generator=random).to(dtype), torch.randn(K, generator=random).to(dtype)
    if rows:
        gate_up[rows // 2, seed] = odd
        x[rows // 2, seed] = odd
    results = {
        "y": (KERNELS["swiglu_cast"](gate_up, clamped), KERNELS["swiglu"](gate_up, None, clamped)),
        "d_rows": (
            KERNELS["swiglu_cast_backward"](dy, gate_up, clamped),
            KERNELS["swiglu_backward"](dy, gate_up, None, clamped)[0],
        ),
    }
    y, root, *cast = KERNELS["norm_cast"](x, weight, 1e-5)
    results["norm"] = ((y, *cast), y)
    for name, ((got, values, scale), wanted) in results.items():
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), name
        reference = fp8.cast_rows_reference(got)
        assert same(values[:rows], reference.values), name
        assert torch.equal(scale.t()[:rows], reference.scale), name
        assert len(values) % FP8_ROWS == 0
        assert not values[rows:].float().any()
    if odd == 1.0:
        exact = x.double()
        inverse = (exact.square().mean(1) + 1e-5).rsqrt()
        torch.testing.assert_close(root.double(), inverse, rtol=1e-5, atol=0)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter rounds towards zero
        torch.testing.assert_close(y.double(), exact * inverse[:, None] * weight.double(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("name", ["check", "check_outputs"])
def test_rows_weights_and_outputs_are_cast_as_by_torch(name):
    run_interpreted(__file__, name)
