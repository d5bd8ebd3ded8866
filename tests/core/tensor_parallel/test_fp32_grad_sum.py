"""Sums of gradients over uses: rounded once, one hook call, and nothing left of the marks."""

from __future__ import annotations

import torch

from megapar.core.tensor_parallel.fp32_grad_sum import fp32_grad_sums, with_fp32_grad_sum


def gradient(dtype, uses, wide):
    weight = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    fired = []
    weight.register_post_accumulate_grad_hook(fired.append)
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(uses)]
    with fp32_grad_sums([weight] if wide else []):
        loss = sum((with_fp32_grad_sum(weight, weight) * factor.to(dtype)).sum() for factor in factors)
    loss.backward()
    assert len(fired) == 1
    assert not hasattr(weight, "fp32_grad_sum")
    return weight.grad, sum(factor.to(dtype).double() for factor in factors)


def test_bf16_rounds_once():
    got, exact = gradient(torch.bfloat16, 16, True)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.to(torch.bfloat16))
    plain, _ = gradient(torch.bfloat16, 16, False)
    assert float((plain.double() - exact).norm()) > 2 * float((got.double() - exact).norm())


def test_one_use_and_wide_dtypes_are_left_alone():
    assert torch.equal(gradient(torch.bfloat16, 1, True)[0], gradient(torch.bfloat16, 1, False)[0])
    assert torch.equal(gradient(torch.float64, 3, True)[0], gradient(torch.float64, 3, False)[0])


def test_without_gradients_nothing_is_marked():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with torch.no_grad(), fp32_grad_sums([weight]):
        assert with_fp32_grad_sum(weight, weight) is weight
