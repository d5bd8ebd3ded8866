"""The norm of a sum is a call of its module, whether functions are compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from megapar.model.layers.norm import LayerNorm, RmsNorm


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
