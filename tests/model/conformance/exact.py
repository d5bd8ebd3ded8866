"""Published classes in true fp64: what they cast to float32 on their way is cast to float64, and nothing is float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Widened(TorchFunctionMode):
    """Reads float32 as float64 in every call of torch: norms, rotary positions, softmax, routers and losses ask for it.

    A class whose parameters are ``double()`` still casts to float32 at those places, and its logits are then 1e-7 off.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func, args = torch.Tensor.double, args[:1]
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class NarrowMade(TorchDispatchMode):
    """Notes the operators, of the forward and of the backward, that make a tensor of fewer bits than float64.

    Attributes:
        operators: Their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.operators.add(f"{func} makes {leaf.dtype}")
        return made


@contextmanager
def widened() -> Iterator[None]:
    """Run code that is written for float32 in float64; tensors without a dtype are float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widened():
            yield
    finally:
        torch.set_default_dtype(before)
