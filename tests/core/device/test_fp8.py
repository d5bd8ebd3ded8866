"""The cast to e4m3 element by element, and the emulated product."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from megapar.core.device import fp8
from megapar.core.device.ops import op

ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 448.0, -448.0, 449.0, 3.0e38, 1e-38, 1e-45, 2.0**-9, 2.0**-10)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def row_with(*numbers):
    """A block whose largest number is 448, so that its scale is 1."""
    x = torch.zeros(1, fp8.BLOCK)
    x[0, 0] = 448.0
    x[0, 1 : len(numbers) + 1] = torch.tensor(numbers)
    return x


def every_number():
    """Every e4m3 number, every midpoint between two, and its neighbours in fp32."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes[codes.isfinite()].unique()
    between = (numbers[1:] + numbers[:-1]) / 2
    around = [torch.nextafter(between, torch.tensor(side)) for side in (-math.inf, math.inf)]
    return torch.cat([numbers, between, *around])


def test_each_number_is_rounded_as_torch_rounds_it():
    numbers = every_number()
    for some in numbers.split(fp8.BLOCK - 1):
        values, scale = fp8.cast_rows_reference(row_with(*some.tolist()))
        assert scale.item() == 1.0
        wanted = some.to(torch.float8_e4m3fn)
        assert torch.equal(values[0, 1 : len(some) + 1].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-100, -30, -1, 0, 7, 100])
def test_a_scale_is_the_smallest_power_of_two_that_fits(dtype, power):
    x = torch.zeros(5, 2 * fp8.BLOCK, dtype=torch.float64)
    largest = (1.0, 1.75, 1.7578125, 1.9921875, 448.0)  # bf16 has them all
    x[:, 130] = -torch.tensor(largest, dtype=torch.float64) * 2.0**power
    values, scale = fp8.cast_rows_reference(x.to(dtype))
    assert scale.shape == (5, 2)
    assert scale.stride() == (1, 5)
    exponents = (-8, -8, -7, -7, 0)
    assert scale[:, 1].tolist() == [2.0 ** (power + exponent) for exponent in exponents]
    assert (values.float().abs() <= fp8.LARGEST).all()
    assert (values[:, 130].float().abs() >= fp8.LARGEST / 2).all()
    assert not values[:, :128].float().any()


def test_what_is_not_finite_is_nan_and_leaves_its_block_alone():
    plain = torch.randn(1, fp8.BLOCK, generator=torch.Generator().manual_seed(0))
    plain[0, 7:10] = 0.0
    x = plain.clone()
    x[0, 7:10] = torch.tensor([math.inf, -math.inf, math.nan])
    (values, scale), (wanted, same) = fp8.cast_rows_reference(x), fp8.cast_rows_reference(plain)
    assert values[0, 7:10].float().isnan().all()
    assert torch.equal(scale, same)
    wanted = wanted.float()
    wanted[0, 7:10] = math.nan
    torch.testing.assert_close(values.float(), wanted, rtol=0, atol=0, equal_nan=True)
    y = fp8.product_reference(x, fp8.cast_weight_reference(torch.ones(128, 128))[0])
    assert y.isnan().all()


def test_a_weight_has_a_scale_per_block_and_its_transpose_the_same_ones():
    weight = torch.randn(384, 640, generator=torch.Generator().manual_seed(0))
    weight[128:256, 256:384] *= 1000
    forward, backward = fp8.cast_weight_reference(weight)
    assert forward.scale.shape == (3, 8)  # five, filled to a multiple of four
    assert backward.scale.shape == (5, 4)
    assert torch.equal(forward.scale[:, :5], backward.scale[:, :3].t())
    assert torch.equal(forward.values.float(), backward.values.float().t())
    assert forward.scale[1, 2] >= 256 * forward.scale[1, 1]
    assert not forward.scale[:, 5:].any()
    torch.testing.assert_close(fp8.dequantized(forward), weight, rtol=2**-4, atol=2e-2)
    assert torch.equal(fp8.dequantized(backward), fp8.dequantized(forward).t())


def test_a_square_weight_has_the_scales_of_its_transpose_transposed():
    weight = torch.ones(256, 256)
    weight[:128, 128:] *= 1024
    forward, backward = fp8.cast_weight_reference(weight)
    assert torch.equal(fp8.dequantized(forward), weight)
    assert torch.equal(fp8.dequantized(backward), weight.t())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_the_emulated_product_is_that_of_dequantized_numbers(dtype):
    random = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 256, generator=random).to(dtype) for rows in (5, 384))
    forward, backward = op("fp8_weight", weight)(weight)
    y = op("fp8_product", x)(x, forward)
    assert y.dtype == dtype
    exact = x.double() @ weight.double().t()
    assert float((y.double() - exact).norm() / exact.norm()) < 0.06  # three bits of mantissa
    values, scale = fp8.cast_rows_reference(x)
    rows = values.double() * scale.double().repeat_interleave(128, 1)
    torch.testing.assert_close(
        y.double(),
        rows @ fp8.dequantized(forward).double().t(),
        rtol=1e-2 if dtype.itemsize < 4 else 1e-5,
        atol=1e-1 if dtype.itemsize < 4 else 1e-4,
    )
    dx = op("fp8_product", y)(y, backward)
    assert dx.shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_may_have_one_scale(dtype):
    random = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(rows, 48, generator=random).to(dtype) for rows in (7, 32))
    x[2] *= 1000
    x[3, :2] = torch.tensor([math.inf, math.nan], dtype=dtype)
    values, scale = fp8.cast_tensor(x)
    assert scale.shape == (1,)
    largest = float(x[2].abs().max())
    assert largest / fp8.LARGEST <= scale.item() < 2 * largest / fp8.LARGEST
    assert values[3, :2].float().isnan().all()
    x[3] = 0
    forward, backward = op("fp8_tensor_weight", weight)(weight)
    assert torch.equal(fp8.dequantized(forward), fp8.dequantized(backward).t())
    y, exact = op("fp8_product", x)(x, forward), x.double() @ weight.double().t()
    assert float((y.double() - exact).norm() / exact.norm()) < 0.06
    assert op("fp8_product", y)(y, backward).shape == x.shape
    assert fp8.product_reference(x[:0], forward).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_experts_have_a_scale_each(dtype):
    random = torch.Generator().manual_seed(3)
    rows, weight = torch.randn(7, 48, generator=random).to(dtype), torch.randn(3, 32, 48, generator=random).to(dtype)
    rows[2] *= 1000
    rows[5] = 0
    values, scale = fp8.cast_whole_rows(rows)
    assert scale.shape == (7,)
    assert scale[2] > 100 * scale[1]
    assert (values[:5].float().abs().amax(1) > fp8.LARGEST / 2 - 1).all()
    counts = torch.tensor([4, 0, 3])
    forward, backward = op("fp8_experts", weight)(weight)
    y = op("fp8_grouped_product", rows)(rows, forward, counts)
    exact = torch.cat([rows[:4].double() @ weight[0].double().t(), rows[4:].double() @ weight[2].double().t()])
    assert y.dtype == dtype
    assert float((y.double() - exact).norm() / exact.norm()) < 0.06
    assert torch.equal(backward.scale, fp8.cast_whole_rows(weight.transpose(1, 2))[1])
    dx = op("fp8_grouped_product", y)(y, backward, counts)
    exact = torch.cat([y[:4].double() @ weight[0].double(), y[4:].double() @ weight[2].double()])
    assert float((dx.double() - exact).norm() / exact.norm()) < 0.06


def test_in_fp64_a_sum_does_not_depend_on_the_order_of_its_terms():
    random = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(rows, 512, generator=random, dtype=torch.float64) for rows in (16, 128))
    x[:, 128:256] *= 2**-16  # subnormal in e4m3 by the scale of another block
    whole = fp8.product_reference(x, fp8.cast_weight_reference(weight)[0])
    parts = [
        fp8.product_reference(a, fp8.cast_weight_reference(b)[0])
        for a, b in zip(x.split(128, 1), weight.split(128, 1), strict=True)
    ]
    assert torch.equal(whole, parts[3] + parts[1] + (parts[0] + parts[2]))


def refusal(error, words):
    """What torch says of scales of another form; from 2.14 on it checks those of fake tensors no longer."""
    old = tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 14)
    return pytest.raises(error, match=words) if old else nullcontext()


def test_the_call_on_a_gpu_has_the_layouts_that_torch_wants(monkeypatch):
    """torch checks shapes and strides of the scales of fake tensors, too; scripts/trace_cuda.sh those of operands."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        weight = torch.empty(384, 640, dtype=torch.bfloat16)
        forward, backward = fp8.cast_weight_cuda(weight)
        for rows in (0, 1, 17, 4096):
            x = torch.empty(rows, 640, dtype=torch.bfloat16)
            y = fp8.product_cuda(x, forward)
            assert y.shape == (rows, 384)
            assert fp8.product_cuda(y, backward).shape == x.shape
        with refusal(RuntimeError, "128"):
            fp8.product_cuda(x, forward._replace(scale=forward.scale[:, :5].contiguous()))
        monkeypatch.setattr(
            fp8, "cast_rows_cuda", lambda x: fp8.ScaledRows(*(y.contiguous() for y in fp8.cast_rows_reference(x)))
        )
        with refusal(RuntimeError, "128"):
            fp8.product_cuda(x, forward)


def test_the_call_with_one_scale_has_the_layouts_that_torch_wants():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        forward, backward = fp8.cast_tensor_weight(torch.empty(384, 640, dtype=torch.bfloat16))
        for rows in (0, 1, 17):
            y = fp8.product_cuda(torch.empty(rows, 640, dtype=torch.bfloat16), forward)
            assert y.shape == (rows, 384)
            assert fp8.product_cuda(y, backward).shape == (rows, 640)
        with refusal(ValueError, "scale_b"):
            fp8.product_cuda(y, backward._replace(scale=backward.scale.expand(2)))


def test_the_grouped_call_on_a_gpu_has_the_layouts_that_torch_wants():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        weight, counts = torch.empty(4, 96, 64, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int64)
        forward, backward = fp8.cast_experts(weight)
        for rows in (0, 1, 33):
            y = fp8.grouped_product_cuda(torch.empty(rows, 64, dtype=torch.bfloat16), forward, counts)
            assert (y.shape, y.dtype) == ((rows, 96), torch.bfloat16)
            assert fp8.grouped_product_cuda(y, backward, counts).shape == (rows, 64)
        with pytest.raises(RuntimeError, match="scale"):
            fp8.grouped_product_cuda(y, backward._replace(scale=backward.scale[:, :5]), counts)


@pytest.mark.parametrize("clamped", [False, True])
def test_norm_and_swiglu_cast_what_they_return(clamped):
    random = torch.Generator().manual_seed(4)
    x, dy = torch.randn(3, 2, 2, 128, generator=random), torch.randn(3, 2, 128, generator=random)
    y, *cast = op("fp8_swiglu", x)(x, clamped)
    leaf = x.clone().requires_grad_()
    wanted = op("clamped_swiglu" if clamped else "swiglu", x)(leaf)
    assert torch.equal(y, wanted)
    (gradient,) = torch.autograd.grad(wanted, leaf, dy)
    found, *back = op("fp8_swiglu_backward", x)(dy, x, clamped)
    assert torch.equal(found, gradient)
    normed, *of_norm = op("fp8_norm", x)(leaf.flatten(2), torch.ones(256), 1e-5)
    assert torch.equal(normed, op("rms_norm", x)(leaf.flatten(2), torch.ones(256), 1e-5))
    for rows, (values, scale) in ((y, cast), (found.flatten(2), back), (normed.detach(), of_norm)):
        same = fp8.cast_rows_reference(rows.flatten(0, 1))
        assert torch.equal(values.view(torch.uint8), same.values.view(torch.uint8))
        assert torch.equal(scale, same.scale)
