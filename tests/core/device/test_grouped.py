"""Products of many experts' rows where the host knows how many each has, and which devices need that."""

from __future__ import annotations

import pytest
import torch

from megapar.core.device.accelerators import CudaDevice, NpuDevice
from megapar.core.device.base import Device
from megapar.core.device.expert_rows import unpermute_cuda, unpermute_reference
from megapar.core.device.grouped import (
    grouped_input_gradient_aligned,
    grouped_input_gradient_reference,
    grouped_linear_aligned,
    grouped_linear_reference,
    grouped_weight_gradient_aligned,
    grouped_weight_gradient_reference,
    input_gradient_by_size,
    linear_by_size,
    weight_gradient_by_size,
)

SIZES = [(3, 0, 5), (0, 0, 4), (4, 4, 4), (0, 0, 0), (7,)]


def made(sizes, dtype, width=10, out=6):
    generator = torch.Generator().manual_seed(2)
    shapes = (sum(sizes), width), (len(sizes), out, width), (sum(sizes), out)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_by_size_equals_the_references(sizes, dtype):
    """Forward, its own backward, and the two gradients by themselves, against the loop in fp64."""
    rows, weight, dy = made(sizes, dtype)
    counts, tolerance = torch.tensor(sizes), 40 * torch.finfo(dtype).eps
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    product = linear_by_size(rows, weight, sizes)
    gradients = torch.autograd.grad(product, (rows, weight), dy)
    x, w, g = (t.detach().double() for t in (rows, weight, dy))
    wanted = (
        grouped_linear_reference(x, w, counts),
        grouped_input_gradient_reference(g, w, counts),
        grouped_weight_gradient_reference(g, x, counts),
    )
    with torch.no_grad():
        again = input_gradient_by_size(dy, weight, sizes), weight_gradient_by_size(dy, rows, sizes)
    for got, want in zip((product, *gradients, *again), (*wanted, *wanted[1:]), strict=True):
        assert got.dtype == dtype
        assert got.shape == want.shape
        if want.numel():
            difference, largest = (float(x.detach().abs().max()) for x in (got.double() - want, want))
            assert difference <= tolerance * max(1.0, largest)


def test_experts_with_as_many_rows_are_one_batched_product():
    rows, weight, dy = made((4, 4, 4), torch.float32)
    with torch.profiler.profile() as seen:
        linear_by_size(rows.requires_grad_(), weight, (4, 4, 4)).backward(dy)
    names = [event.name for event in seen.events()]
    assert (names.count("aten::mm"), names.count("aten::bmm")) == (0, 2)


@pytest.mark.parametrize(
    ("dtype", "width", "calls"),
    [(torch.bfloat16, 16, 3), (torch.float32, 16, 3), (torch.float64, 16, 0), (torch.bfloat16, 12, 0)],
)
def test_the_kernel_multiplies_what_it_takes(monkeypatch, dtype, width, calls):
    """Also the gradients, each by itself: no other form gives other numbers."""
    seen, kernel = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *x, **more: seen.append(1) or kernel(*x, **more))
    rows, weight, dy = made((3, 0, 5), dtype, width, 8)
    counts = torch.tensor((3, 0, 5))
    grouped_linear_aligned(rows, weight, counts)
    grouped_input_gradient_aligned(dy, weight, counts)
    grouped_weight_gradient_aligned(dy, rows, counts)
    assert len(seen) == calls


WIDTHS = (2560, 1536)


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "widths", "reason"),
    [
        ((9, 0), None, torch.bfloat16, WIDTHS, ""),
        ((10, 3), None, torch.bfloat16, WIDTHS, ""),
        ((8, 0), None, torch.bfloat16, WIDTHS, "compute capability 9.x and 10.x, and a GPU has 8.0"),
        ((12, 0), None, torch.bfloat16, WIDTHS, "a GPU has 12.0"),
        ((9, 0), None, torch.float16, WIDTHS, "takes bfloat16, not float16"),
        ((9, 0), None, torch.float32, WIDTHS, "takes bfloat16, not float32"),
        ((9, 0), None, torch.bfloat16, (2560, 1540), "a multiple of 16 bytes, not of 1540 bfloat16"),
        ((9, 4), "7.0", torch.bfloat16, WIDTHS, "NVIDIA GPUs"),
    ],
)
def test_which_gpus_have_a_kernel(monkeypatch, capability, hip, dtype, widths, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(CudaDevice, "name", "a GPU")
    device = object.__new__(CudaDevice)
    device.local_rank = 0
    found = device.grouped_lacks(dtype, widths)
    assert reason in found
    assert bool(found) == bool(reason)


def test_which_other_devices_do():
    npu = object.__new__(NpuDevice)
    for device in (Device(), npu):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert device.grouped_lacks(dtype, (16, 32)) == ""
        assert "float64" in device.grouped_lacks(torch.float64, (16, 32))
    assert "not of 20 bfloat16" in Device().grouped_lacks(torch.bfloat16, (16, 20))
    assert npu.grouped_lacks(torch.bfloat16, (16, 20)) == ""


@pytest.mark.parametrize("kept", [None, torch.tensor([[True, False], [True, True]])])
def test_rows_of_a_message_are_summed_where_they_lie(kept):
    """The columns after them are not read."""
    message = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    message[:, 16:] = float("nan")
    row = torch.tensor([[2, 0], [3, 1]])
    got = unpermute_cuda(message[:, :16], row, kept)
    assert torch.equal(got, unpermute_reference(message[:, :16].clone(), row, kept))
