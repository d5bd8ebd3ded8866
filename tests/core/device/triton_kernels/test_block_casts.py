"""Kernels that cast to e4m3 against the reference, run by Triton's interpreter, bit for bit.

The cast itself is torch's here (``cast_as_torch``). That the hardware's is torch's, too, was measured on an H100:
"casts" in benchmarks/throughput/results/2026-11-27-h100-*.jsonl.
"""

from __future__ import annotations

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
    for got, wanted in zip(KERNELS["cast_whole_rows"](whole), fp8.cast_whole_rows_reference(whole), strict=True):
        assert same(got, wanted)
    weight = torch.randn(256, K, generator=random).to(dtype)
    weight[seed, seed] = odd
    results = KERNELS["cast_weight"](weight)
    for got, wanted in zip((results[:2], results[2:]), fp8.cast_weight_reference(weight), strict=True):
        assert same(got[0], wanted.values)
        assert torch.equal(got[1], wanted.scale)


def test_rows_and_weights_are_cast_as_by_torch():
    run_interpreted(__file__)
