"""How layers run their pure functions: the code between two launches of collectives, without a module in it.

A module hands ``run`` a function and its arguments. As it is that is a call; ``Compiled`` compiles each function once
for all layers (weights are arguments, so nothing is compiled again per layer), and whole, without a graph break.
Whole blocks are never compiled: sharding's hooks are off under dynamo, and tickets break graphs.

How many samples, positions or rows there are differs from step to step: ``counted`` says which dims these are.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class FunctionRunner(Protocol):
    """Calls a function of tensors and numbers, one that launches nothing and draws nothing."""

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns."""
        ...


def plain(function: Callable[..., T], *arguments: Any) -> T:
    """The call itself."""
    return function(*arguments)


def counted(*dims: int) -> Callable[[F], F]:
    """Says of a function how many leading dims of each argument, in order, count samples, positions or rows.

    What is counted may have any size in any call. The last dim of numbers is never counted: it holds features.
    """

    def mark(function: F) -> F:
        setattr(function, _COUNTED, dims)
        return function

    return mark


_COUNTED = "counted_dims"


class Compiled:
    """Runs functions as torch.compile makes them.

    functions: the forms of what has been asked for, by the plain function. A form is code for any counts, for given
    features, with or without gradients; each is compiled by itself, so torch's limit of recompilations, which is of one
    code, is not reached by a run's evaluations, rows and growing lengths. Less than two rows are not worth a form: they
    run as they are. given_up: functions that torch could not compile, or not often enough, which run as they are.
    backend: of torch.compile. most_forms: of one function; beyond, its sizes are not such as compiling pays for.
    """

    def __init__(self, backend: str = "inductor", most_forms: int = 64) -> None:
        self.functions: dict[Callable[..., Any], dict[Hashable, Callable[..., Any]]] = {}
        self.given_up: set[Callable[..., Any]] = set()
        self._backend, self._most_forms = backend, most_forms

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Compiled at the first call of a form; as it is where torch gives up, with a warning for each function."""
        forms = self.functions.setdefault(function, {})
        form = None if function in self.given_up else _form(function, arguments)
        if form is None:
            return function(*arguments)
        try:
            if form not in forms:
                forms[form] = self._make(function, len(forms))
                _mark(function, arguments)
            result: T = forms[form](*arguments)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit, _TooManyError) as e:
            self.given_up.add(function)
            why = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
            message = f"{function.__name__} runs uncompiled from now on ({why}); the numbers are the same"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return function(*arguments)
        return result

    def _make(self, function: Callable[..., T], number: int) -> Callable[..., T]:
        if number == self._most_forms:
            raise _TooManyError(f"it was compiled {number} times")
        # Torch keeps what it compiled, and what it saw of sizes, by code and by its name.
        code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
        own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
        return torch.compile(own, fullgraph=True, backend=self._backend)


class _TooManyError(Exception):
    """Too many forms of one function."""


def _counts(x: Tensor, leading: int) -> int:
    """How many dims of an argument count; a mask may consist of nothing else."""
    return min(leading, x.dim() if x.dtype == torch.bool else x.dim() - 1)


def _form(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Hashable | None:
    """What a compiled form is good for; None where there is nothing to compile for: less than two rows.

    A count of one is a size by itself for torch, so a single sample has forms of its own.
    """
    dims = getattr(function, _COUNTED, ())
    form: list[Hashable] = [torch.is_grad_enabled()]
    for number, x in enumerate(arguments):
        if not isinstance(x, Tensor):
            form.append(x)
            continue
        count = _counts(x, dims[number]) if number < len(dims) else 0
        shape = x.shape
        if number == 0 and count and shape[:count].numel() < 2:
            return None
        sizes = tuple([min(size, 2) for size in shape[:count]]) + tuple(shape[count:])
        form.append((sizes, count, x.dtype, x.requires_grad, x.is_contiguous()))
    return tuple(form)


def _mark(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Tell torch which sizes will change, before it compiles for those it sees."""
    for x, leading in zip(arguments, getattr(function, _COUNTED, ()), strict=False):
        if isinstance(x, Tensor):
            for dim in range(_counts(x, leading)):
                if x.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(x, dim)
