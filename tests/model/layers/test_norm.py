"""The norm of a sum is a call of its module, whether functions are compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from megapar.core.comm.axis import Axis
from megapar.core.device.ops import OPS
from megapar.core.tensor_parallel.split_norm import SplitNorm
from megapar.model.layers.norm import LayerNorm, RmsNorm
from tests.support.ascend import stand_in

stand_in()


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function as a compiling runner would."""
    return function(*arguments)


@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_of_a_norm_see_the_norm_of_a_sum(kind: Any, compiled: bool) -> None:
    """FSDP unshards a weight in one: where a bucket ends inside a layer, the norm has a group of its own."""
    norm = kind(8, 1e-5, dtype=torch.float64, device="cpu", **({"run": call} if compiled else {}))
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter)
    calls: list[Any] = []
    norm.register_forward_pre_hook(lambda *_: calls.append(1))
    x, y = torch.randn(2, 3, 8, dtype=torch.float64)
    total, normed = norm.after(x, y)
    assert calls == [1]
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, norm(x + y))


def test_one_plus_weight_is_gemma_s_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 7, 8, generator=generator), 0.01 * torch.randn(8, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        theirs, ours = Gemma3RMSNorm(8, 1e-3).to(dtype), RmsNorm(8, 1e-3, dtype=dtype, device="cpu", one_plus=True)
        with torch.no_grad():
            theirs.weight.copy_(weight)
            ours.weight.copy_(weight)
        assert torch.equal(ours(x.to(dtype)), theirs(x.to(dtype)))
    layer_norm = LayerNorm(8, 1e-3, dtype=torch.bfloat16, device="cpu", one_plus=True)
    with torch.no_grad():
        layer_norm.weight.copy_(weight)
        layer_norm.bias.fill_(0.5)
    wide = torch.nn.functional.layer_norm(x.bfloat16().float(), (8,), 1 + weight.bfloat16().float(), None, 1e-3) + 0.5
    torch.testing.assert_close(layer_norm(x.bfloat16()), wide.bfloat16(), rtol=1e-2, atol=1e-2)


def split(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm over heads that mp may split, of this process' 4 heads."""
    heads, scale = x.unflatten(-1, (4, -1))[None], weight.unflatten(-1, (4, -1))
    return SplitNorm(epsilon, Axis.single("mp"))(heads, heads.detach(), scale, scale.detach())[0].flatten(-2)[0]


RMS = {**{f"rms, {device}": form for device, form in OPS["rms_norm"].items()}, "split": split}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [*RMS, "layer"])
def test_rows_of_large_values_are_normed_as_in_fp64(form: str, dtype: torch.dtype) -> None:
    """Squares of 1e4 overflow in fp16; rows of 1e4, with one outlier, of small numbers, and around a mean of 1e4.

    That mean is in fp32 only for a layer norm: on a CPU torch keeps it in 16 bits for the backward.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator)
    x[0] *= 1e4
    x[1, 7] = 3e4
    x[2] *= 1e-4
    if form != "layer" or dtype == torch.float32:
        x[3] = 1e4 + 100 * x[3]
    weight, upstream = 1 + 0.1 * torch.randn(64, generator=generator), torch.randn(5, 64, generator=generator)
    own = [t.to(dtype).requires_grad_() for t in (x, weight)]
    wide, scale = exact = [t.detach().double().requires_grad_() for t in own]
    centred = wide - wide.mean(-1, keepdim=True) if form == "layer" else wide
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    if form == "layer":
        norm = LayerNorm(64, 1e-5, dtype=dtype, device="cpu")
        with torch.no_grad():
            norm.weight.copy_(own[1])
            norm.bias.zero_()
        y, own[1] = norm(own[0]), norm.weight
    else:
        y = RMS[form](*own, 1e-5)
    upstream = upstream.to(dtype)
    found = (y, *torch.autograd.grad(y, own, upstream))
    wanted = (want, *torch.autograd.grad(want, exact, upstream.double()))
    tolerance = 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    for got, expected in zip(found, wanted, strict=True):
        rows = expected.detach().abs().amax(-1, keepdim=True)
        assert ((got.double() - expected).abs() <= tolerance * rows).all()
