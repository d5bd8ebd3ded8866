"""Tensors to rows and back: the GPU's form, whose operators a CPU has too, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from megapar.core.device import bucket_rows as module
from megapar.core.device import triton_operators
from megapar.core.device.bucket_rows import (
    MOST_SLICES,
    add_gradient_cuda,
    add_gradient_reference,
    pack_bucket_cuda,
    pack_bucket_reference,
    unpack_bucket_cuda,
    unpack_bucket_reference,
)

SHAPES = {
    "matrices": ([(8, 3), (4, 5)], [0, 0]),
    "other dims": ([(8, 3), (2, 4, 5), (3, 2, 8, 2), (4,)], [0, 1, 2, 0]),
    "one vector": ([(12,)], [0]),
    "many slices": ([(MOST_SLICES + 1, 4), (4, 2)], [1, 0]),
}
PIECES = 4


def draw(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[int], int]:
    """Tensors, their dims, and the length of a row."""
    shapes, dims = SHAPES[name]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    return tensors, dims, sum(tensor.numel() for tensor in tensors) // PIECES


@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_both_forms_pack_the_same_bits_and_unpack_them(name: str, dtype: torch.dtype, rest: int) -> None:
    tensors, dims, length = draw(name, dtype)
    expected, got = (torch.full((PIECES, length + rest), torch.nan) for _ in range(2))
    pack_bucket_reference(expected, tensors, dims)
    pack_bucket_cuda(got, tensors, dims)
    assert torch.equal(got[:, :length], expected[:, :length])
    for form in (unpack_bucket_reference, unpack_bucket_cuda):
        back = [torch.full_like(tensor, torch.nan) for tensor in tensors]
        form(got.to(dtype), back, dims)
        assert all(map(torch.equal, back, tensors))


@pytest.mark.parametrize(("name", "calls"), [("matrices", 0), ("other dims", 0), ("one vector", 1), ("many slices", 1)])
def test_one_call_takes_all_but_a_single_tensor_and_too_many_slices(name: str, calls: int) -> None:
    tensors, dims, length = draw(name, torch.float32)
    rows = torch.empty(PIECES, length)
    with (
        patch.object(module, "pack_bucket_reference", wraps=pack_bucket_reference) as packed,
        patch.object(module, "unpack_bucket_reference", wraps=unpack_bucket_reference) as unpacked,
    ):
        pack_bucket_cuda(rows, tensors, dims)
        unpack_bucket_cuda(rows, tensors, dims)
    assert (packed.call_count, unpacked.call_count) == (calls, calls)


@pytest.mark.parametrize("form", [add_gradient_reference, add_gradient_cuda])
@pytest.mark.parametrize("begins", [True, False])
def test_gradients_are_added_in_the_dtype_of_the_sum(form: Callable[..., torch.Tensor], begins: bool) -> None:
    total, gradient = torch.full((1, 3, 5), 1.0), torch.full((1, 3, 5), 2.0**-10, dtype=torch.bfloat16)
    assert form(total, gradient, begins=begins) is total
    assert total.unique().tolist() == [2.0**-10 + (0 if begins else 1)]


def test_which_gradients_the_kernel_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit ones whose pieces are contiguous, in sums whose pieces may lie apart."""
    monkeypatch.setattr(triton_operators, "usable", lambda device: True)
    row, gradient = torch.zeros(2, 20), torch.zeros(2, 3, 5, dtype=torch.bfloat16)
    total = row[:, 2:17].unflatten(1, (3, 5))
    assert triton_operators.adds_gradient(total, gradient)
    assert not triton_operators.adds_gradient(total, gradient.float())
    assert not triton_operators.adds_gradient(total.bfloat16(), gradient)
    assert not triton_operators.adds_gradient(total, gradient.new_zeros(2, 5, 3).mT)
    assert not triton_operators.adds_gradient(row[:, :0], gradient[:, 0, :0])
