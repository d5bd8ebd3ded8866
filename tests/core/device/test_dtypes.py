"""Products that are added to a wider sum: the entry against its reference; its GPU form by schema, and by shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.core.device.dtypes import (
    add_product_reference,
    add_product_wide,
    at_least_fp32,
    wide_product,
    wide_product_reference,
    wide_product_rounded,
)
from megapar.core.device.ops import op


class Called(TorchDispatchMode):
    """The operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note its name."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_reference_adds(dtype: torch.dtype, begins: bool) -> None:
    total = torch.full((3, 5), 7.0, dtype=torch.promote_types(dtype, torch.float32))
    a, b = torch.randn(4, 3).to(dtype).t(), torch.randn(4, 5).to(dtype)
    expected = a.double() @ b.double() + (0 if begins else 7)
    assert op("add_product", a) is add_product_reference  # on a CPU
    assert add_product_reference(total, a, b, begins=begins) is total
    torch.testing.assert_close(total.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_adds_in_the_product(dtype: torch.dtype, begins: bool) -> None:
    with FakeTensorMode(), Called() as called:
        assert op("add_product", torch.empty(1, dtype=dtype, device="cuda")) is add_product_wide
        # The operators' shape functions are those of every device; a fake GPU without a driver cannot copy.
        total, a, b = torch.empty(3, 5), torch.empty(4, 3, dtype=dtype).t(), torch.empty(4, 5, dtype=dtype)
        called.names.clear()
        assert add_product_wide(total, a, b, begins=begins) is total
    expected = "aten.addmm.out" if dtype == torch.float32 else f"aten.{'mm' if begins else 'addmm'}.dtype_out"
    assert called.names == [expected]


def test_one_dtype_needs_no_wider_form() -> None:
    total, a, b = torch.ones(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    torch.testing.assert_close(add_product_wide(total.clone(), a, b, begins=False), total + a @ b)
    torch.testing.assert_close(add_product_wide(total.clone(), a, b, begins=True), a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_wide_product_is_not_rounded(dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 64).to(dtype), torch.randn(64, 5).to(dtype)
    found, exact = wide_product_reference(a, b), a.double() @ b.double()
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    rounded = wide_product_rounded(a, b)
    assert rounded.dtype == found.dtype
    torch.testing.assert_close(rounded, (a @ b).to(found.dtype), rtol=0, atol=0)
    if dtype != torch.bfloat16:
        torch.testing.assert_close(wide_product(a, b), a @ b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "kernel"), [((), "mm"), ((2, 6), "bmm")])
def test_a_gpu_makes_a_wide_product_by_one_kernel(batch: tuple[int, ...], kernel: str, dtype: torch.dtype) -> None:
    with FakeTensorMode(), Called() as called:
        a, b = torch.empty(*batch, 3, 4, dtype=dtype), torch.empty(*batch, 4, 5, dtype=dtype)
        called.names.clear()
        product = wide_product(a, b)
        assert (product.dtype, product.shape) == (torch.float32, (*batch, 3, 5))
    assert [name for name in called.names if name.endswith("mm.dtype")] == [f"aten.{kernel}.dtype"]


def test_wide_is_at_least_fp32() -> None:
    assert (
        at_least_fp32(torch.bfloat16) == at_least_fp32(torch.float16) == at_least_fp32(torch.float32) == torch.float32
    )
    assert at_least_fp32(torch.float64) == torch.float64
