"""The norm of a sum is a call of its module, whether functions are compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
