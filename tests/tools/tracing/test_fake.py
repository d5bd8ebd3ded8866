"""A cached operator equals one that is derived; what is replaced for a while comes back, whatever happens."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.tools.tracing.fake import RememberingMode, replaced

Operator = Callable[[Tensor, Tensor], object]

OPERATORS: dict[str, Operator] = {
    "new": lambda x, y: x @ y,
    "another dtype": lambda x, y: x.to(torch.bfloat16),
    "view": lambda x, y: x.view(2, 2, 6)[1, :, 2:].transpose(0, 1),
    "in place": lambda x, y: x.add_(1.0),
    "views in a list": lambda x, y: x.split(2, dim=1),
    "uneven chunks": lambda x, y: x.chunk(3),
    "several new": lambda x, y: torch.max(x, dim=1),
    "list in place": lambda x, y: torch._foreach_mul_([x, y], 2.0),
    "list of new": lambda x, y: torch._foreach_norm([x, y]),
    "out": lambda x, y: torch.mul(x, 2.0, out=torch.empty_like(x)),
    "reshape that copies": lambda x, y: x.t().reshape(-1),
    "from a list": lambda x, y: torch.cat([x, x, y.t()]),
    "number": lambda x, y: x.numel(),
    "constant": lambda x, y: torch.tensor([1.0, 2.0]) * 2,
}


def said(result: object, x: Tensor, y: Tensor) -> object:
    """Shapes, layout and whose memory it is."""
    if isinstance(result, list | tuple):
        return [said(one, x, y) for one in result]
    if not isinstance(result, Tensor):
        return result
    places = {given.untyped_storage()._cdata: name for name, given in (("x", x), ("y", y))}
    storage = result.untyped_storage()
    owner = "same" if result is x or result is y else places.get(storage._cdata, storage.nbytes())
    return tuple(result.shape), result.stride(), result.storage_offset(), result.dtype, result.device, owner


@pytest.mark.parametrize("name", OPERATORS)
def test_the_second_time_is_as_the_first(name: str) -> None:
    operator = OPERATORS[name]
    with FakeTensorMode():
        x, y = torch.empty(4, 6), torch.empty(6, 4)
        expected = said(operator(x, y), x, y)
    with RememberingMode():
        for _ in range(3):
            x, y = torch.empty(4, 6), torch.empty(6, 4)
            assert said(operator(x, y), x, y) == expected


def test_shapes_strides_and_offsets_are_told_apart() -> None:
    with RememberingMode():
        x = torch.empty(4, 6)
        assert [t.sum(0).shape for t in (x, x.t(), x[:2])] == [(6,), (4,), (6,)]
        assert x[1:3].view(-1).storage_offset() == 6
        assert x[2:4].view(-1).storage_offset() == 12
        assert (x > 0).dtype == torch.bool
        assert (x + 1).dtype == torch.float32
        assert (x.int() + 1).dtype == torch.int32
        assert (x.int() + 1.0).dtype == torch.float32


def test_memory_of_a_view_is_freed_with_the_last_that_sees_it() -> None:
    with RememberingMode():
        for _ in range(2):
            x = torch.empty(4, 6)
            view = x.view(24)
            assert view.untyped_storage() is x.untyped_storage()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_products_of_groups_are_known_in_every_dtype_that_has_them(dtype: torch.dtype) -> None:
    """torch's own description of the operator knows bf16 alone."""
    with RememberingMode():
        rows_RI = torch.empty(12, 16, dtype=dtype, requires_grad=True)
        weight_EIO = torch.empty(2, 16, 8, dtype=dtype, requires_grad=True)
        for _ in range(2):  # looked at, and remembered
            ends_E = torch.empty(2, dtype=torch.int32)
            product_RO = torch.nn.functional.grouped_mm(rows_RI, weight_EIO, offs=ends_E)
            product_RO.backward(torch.empty_like(product_RO))
            assert (product_RO.shape, product_RO.dtype) == ((12, 8), dtype)
            for x in (rows_RI, weight_EIO):
                assert x.grad is not None
                assert (x.grad.shape, x.grad.dtype) == (x.shape, dtype)


def test_a_wide_sum_of_a_product_has_the_shape_and_dtype_that_torch_gives_it() -> None:
    """torch 2.11 derives it by the decomposition of the sum without a dtype, which fails."""
    half = {"dtype": torch.bfloat16, "device": "meta"}
    total, a, b = torch.empty(4, 3, device="meta"), torch.empty(4, 5, **half), torch.empty(5, 3, **half)
    for mode in (FakeTensorMode, RememberingMode):
        with mode(allow_non_fake_inputs=True):
            for _ in range(2):
                new = torch.ops.aten.addmm.dtype(total, a, b, torch.float32)
                assert (new.shape, new.dtype, new.device.type) == ((4, 3), torch.float32, "meta")
                out = torch.empty(4, 3, device="meta")
                assert torch.addmm(total, a, b, out_dtype=torch.float32, out=out) is out


class Thing:
    size = 1

    def double(self) -> int:
        return 2 * self.size


def test_an_attribute_of_a_module_comes_back_after_an_error():
    module = types.SimpleNamespace(name="own")

    def look() -> None:
        with replaced(module, "name", "other"):
            raise KeyError(module.name)

    with pytest.raises(KeyError, match="other"):
        look()
    assert module.name == "own"


def test_a_method_of_one_object_is_its_class_s_again():
    thing = Thing()
    with replaced(thing, "double", lambda: 7):
        assert thing.double() == 7
        assert Thing().double() == 2
    assert vars(thing) == {}
    assert thing.double() == 2


def test_what_is_not_there_cannot_be_replaced():
    with pytest.raises(AttributeError), replaced(Thing(), "missing", 1):
        pass
