"""Heads of latent attention: every form of its two operators is the reference, and copies no more than it must."""

from __future__ import annotations

import pytest
import torch

from megapar.core.device.attention.whole import HeadWidths, kernel_head_dims
from megapar.core.device.latent_heads import (
    join_heads_apart,
    join_heads_once,
    join_heads_reference,
    rotate_last_in_place,
    rotate_last_npu,
    rotate_last_reference,
)
from megapar.core.device.ops import OPS
from tests.support.ascend import stand_in

stand_in()
BATCH, LENGTH, HEADS, PLAIN, ROTATED, VALUE = 2, 5, 3, 7, 4, 6


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(found, wanted, inputs, wants, bound) -> None:
    """Equal results and gradients."""
    upstream = [drawn(*y.shape, seed=7 + number, dtype=y.dtype) for number, y in enumerate(wanted)]
    grads, expected = torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, wants, upstream)
    for y, want in zip((*found, *grads), (*wanted, *expected), strict=True):
        assert y.dtype == want.dtype
        torch.testing.assert_close(y, want, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1.7])
@pytest.mark.parametrize("width", [PLAIN + ROTATED, 16])
@pytest.mark.parametrize("form", [rotate_last_in_place, rotate_last_npu])
def test_rotate_last(form, dtype, factor, width):
    angle = drawn(BATCH, LENGTH, ROTATED // 2, seed=1)
    inputs = [drawn(BATCH, LENGTH, HEADS, PLAIN + ROTATED, dtype=dtype).requires_grad_() for _ in range(2)]
    product = inputs[0] * 1.0
    found = form(product, angle.cos(), angle.sin(), factor, width)
    want = rotate_last_reference(inputs[1], angle.cos(), angle.sin(), factor, width)
    if width == PLAIN + ROTATED and form is rotate_last_in_place:
        assert found.data_ptr() == product.data_ptr()
    compare((found,), (want,), inputs[:1], inputs[1:], 1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [HeadWidths(PLAIN + ROTATED, VALUE), HeadWidths(12, 12), HeadWidths(16, VALUE)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", [join_heads_once, join_heads_apart])
def test_join_heads(form, dtype, widths, wide):
    """The rotary key may be wider than the product, so that its gradient is not rounded."""
    own = torch.float32 if wide else dtype
    inputs, wants = (
        (
            drawn(BATCH, LENGTH, HEADS, PLAIN + VALUE, dtype=dtype).requires_grad_(),
            drawn(BATCH, LENGTH, ROTATED, seed=1, dtype=own).requires_grad_(),
        )
        for _ in range(2)
    )
    found, wanted = (make(*two, PLAIN, widths) for make, two in ((form, inputs), (join_heads_reference, wants)))
    viewed = found[1].untyped_storage()._cdata == inputs[0].untyped_storage()._cdata
    assert viewed == (form is join_heads_once and widths.value == VALUE)
    compare(found, wanted, inputs, wants, 1e-6 if dtype == torch.float32 else 2e-2)


def test_the_sum_over_heads_is_not_rounded_for_a_wide_key():
    product = drawn(1, 1, 64, PLAIN + VALUE, dtype=torch.bfloat16).requires_grad_()
    key = drawn(1, 1, ROTATED).requires_grad_()
    k, _ = join_heads_once(product, key, PLAIN, HeadWidths(PLAIN + ROTATED, VALUE))
    dk = drawn(*k.shape, seed=3, dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(k, (key,), dk)
    torch.testing.assert_close(found, dk[..., PLAIN:].float().sum(2), rtol=1e-6, atol=1e-6)


def test_sizes_of_kernels():
    """fp64 and plain devices take heads as they are, a CPU's kernel one size."""
    assert kernel_head_dims("attention", torch.empty(0, dtype=torch.float64), 14, 10) == (14, 10)
    assert kernel_head_dims("attention", torch.empty(0, device="meta"), 14, 10) == (14, 10)
    assert kernel_head_dims("attention", torch.empty(0), 14, 10) == (14, 14)
    assert kernel_head_dims("attention", torch.empty(0), 14, 18) == (18, 18)


def test_every_device_has_both():
    for name in ("rotate_last", "join_heads"):
        assert OPS[name].keys() == {"reference", "cpu", "cuda", "npu"}
