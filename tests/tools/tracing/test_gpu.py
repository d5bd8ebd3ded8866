"""Kernels of attention of a step on a GPU: torch's choice for what megapar asks of it, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.core.device.attention import whole as attention
from megapar.core.device.attention.table import CAUSAL, FULL, MASKED
from megapar.core.device.ops import OPS
from scripts.tracing.gpu import FakeGpu, as_on_a_gpu

META = torch.device("meta")
KERNELS = ("cudnn", "flash", "efficient")


class Called(TorchDispatchMode):
    """Names of the operators of attention, and the most elements that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels += [name for name in KERNELS if f"product_{name}_attention" in func._schema.name]
        self.largest = max(self.largest, result.numel() if isinstance(result, Tensor) else 0)
        return result


def heads(number: int, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(2, number, 704, size, device=META, dtype=dtype, requires_grad=True)


def called(
    call: Callable[..., Tensor], /, *tensors: Tensor, capability: tuple[int, int] = (9, 0), **more: Any
) -> Called:
    """What a call and its backward run on a GPU of this compute capability."""
    found = Called()
    with as_on_a_gpu(FakeGpu(META)), pytest.MonkeyPatch.context() as patch, found:
        patch.setattr(attention, "capability_of", lambda like: capability)
        y = call(*tensors, **more)
        y.backward(torch.empty_like(y))
    assert y.shape == tensors[0].shape
    return found


MASK = torch.ones(2, 704, dtype=torch.bool, device=META)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3)])
def test_attention_with_a_mask_never_is_cudnns(capability: tuple[int, int]) -> None:
    """Its backward returns NaN where S % 128 = 64 (torch's issue 196678)."""
    qkv = heads(4), heads(4), heads(4)
    padded = called(OPS["attention"]["cuda"], *qkv, form=MASKED, valid=MASK, capability=capability)
    by_mask = partial(attention.torch_attention, MASKED, mask=MASK[:, None, None])
    segment = called(by_mask, *qkv, capability=capability)
    assert padded.kernels == segment.kernels == ["efficient", "efficient"]


def test_dropout_never_is_cudnns() -> None:
    found = called(OPS["attention"]["cuda"], heads(4), heads(4), heads(4), form=FULL, dropout=0.1)
    assert found.kernels == ["flash", "flash"]


def test_the_trace_sees_what_torch_does_with_a_mask_by_itself() -> None:
    found = called(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK[:, None, None]), heads(4), heads(4), heads(4)
    )
    assert found.kernels == ["cudnn", "cudnn"]


def test_all_calls_of_torchs_attention_have_one_home() -> None:
    package = Path(attention.__file__).parents[3]
    callers = [path.name for path in package.rglob("*.py") if "scaled_dot_product_attention(" in path.read_text()]
    assert callers == ["whole.py"]


@pytest.mark.parametrize(
    ("dtype", "capability", "kernel", "form"),
    [
        (torch.float32, (9, 0), "efficient", "attention"),
        (torch.float32, (8, 0), "efficient", "attention_slice"),
        (torch.float16, (7, 0), "efficient", "attention"),
        (torch.float16, (7, 5), "efficient", "attention_slice"),
        (torch.bfloat16, (8, 0), "flash", "attention"),
        (torch.bfloat16, (9, 0), "cudnn", "attention"),
        (torch.bfloat16, (10, 0), "cudnn", "attention"),
        (torch.bfloat16, (12, 0), "flash", "attention"),
        (torch.bfloat16, (9, 0), "flash", "attention_slice"),
    ],
)
def test_grouped_heads_store_no_scores(dtype: torch.dtype, capability: tuple[int, int], kernel: str, form: str) -> None:
    """The memory-efficient kernel takes as many heads of keys as of queries; torch would multiply plainly."""
    tensors = heads(4, dtype=dtype), heads(2, dtype=dtype), heads(2, dtype=dtype)
    more = {"form": CAUSAL} if form == "attention" else {}
    found = called(OPS[form]["cuda"], *tensors, capability=capability, **more)
    assert found.kernels == [kernel, kernel]
    assert found.largest == tensors[0].numel()
