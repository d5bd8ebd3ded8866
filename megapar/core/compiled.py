"""How layers run their pure functions: the code between two launches of collectives, without a module in it.

A module hands ``run`` a function and its arguments. As it is that is a call; ``Compiled`` compiles each function once
for all layers (weights are arguments, so nothing is compiled again per layer), and whole: a graph break is an error.
Whole blocks are never compiled: sharding's hooks are off under dynamo, and tickets break graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Run(Protocol):
    """Calls a function of tensors and numbers, one that launches nothing and draws nothing."""

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns."""
        ...


def plain(function: Callable[..., T], *arguments: Any) -> T:
    """The call itself."""
    return function(*arguments)


class Compiled:
    """Runs functions as torch.compile makes them.

    functions: what has been asked for, by the plain function. backend: of torch.compile.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self.functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._backend = backend

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Compiled at the first call; again where a shape changes, and then for any size."""
        if function not in self.functions:
            self.functions[function] = torch.compile(function, fullgraph=True, backend=self._backend)
        result: T = self.functions[function](*arguments)
        return result


def run_functions(model: nn.Module, run: Run) -> None:
    """Let the layers of ``model`` run their pure functions so from now on."""
    for module in model.modules():
        if hasattr(module, "run"):
            module.run = run  # type: ignore[assignment]
