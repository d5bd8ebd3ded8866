"""Execution of the pure functions of layers: the code between two launches of collectives, without modules.

A module passes a function and its arguments to ``run``. ``plain`` calls it. ``Compiled`` compiles each function once
for all layers, because weights are arguments, and as a whole, without graph breaks. Whole blocks are never compiled,
because sharding's hooks do not run under dynamo and tickets break graphs.

The number of samples, positions or rows can differ from step to step: ``counted`` marks these dims.
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
    """Caller of functions of tensors and numbers that launch no collectives and draw no random numbers."""

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function and return its result."""
        ...


def plain(function: Callable[..., T], *arguments: Any) -> T:
    """Call the function uncompiled."""
    return function(*arguments)


def counted(*dims: int) -> Callable[[F], F]:
    """Mark how many leading dims of each argument, in order, count samples, positions or rows.

    These dims may have any size in any call. The last dim of a tensor of numbers is its features and is never counted.
    """

    def mark(function: F) -> F:
        setattr(function, _COUNTED, dims)
        return function

    return mark


_COUNTED = "counted_dims"


class Compiled:
    """Caller of functions compiled by torch.compile.

    A form of a function is code for any counts and for given features, with or without gradients. Each form is compiled
    separately. A run's evaluations, rows and growing lengths therefore do not reach torch's limit of recompilations,
    which applies to each code object. Calls with fewer than two rows run uncompiled.

    Attributes:
        functions: Plain function -> its compiled forms.
        given_up: Functions that run uncompiled, because torch could not compile them or they needed too many forms.
    """

    def __init__(self, backend: str = "inductor", most_forms: int = 64) -> None:
        """Start without forms.

        Args:
            backend: Backend of torch.compile.
            most_forms: Maximum forms of one function. Beyond it compilation does not pay off.
        """
        self.functions: dict[Callable[..., Any], dict[Hashable, Callable[..., Any]]] = {}
        self.given_up: set[Callable[..., Any]] = set()
        self._backend, self._most_forms = backend, most_forms

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function, and compile it at the first call of each form.

        If torch gives up, the function runs uncompiled from then on, with one warning per function.
        """
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
            reason = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
            message = f"{function.__name__} runs uncompiled from now on ({reason}); the numbers are the same"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return function(*arguments)
        return result

    def _make(self, function: Callable[..., T], number: int) -> Callable[..., T]:
        if number == self._most_forms:
            raise _TooManyError(f"it was compiled {number} times")
        # torch caches compiled code and observed sizes by code object and its name, so each form needs a new name.
        code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
        form = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
        return torch.compile(form, fullgraph=True, backend=self._backend)


class _TooManyError(Exception):
    """A function has too many forms."""


def _counts(x: Tensor, leading: int) -> int:
    """Return the number of counted dims of an argument. All dims of a mask may be counted."""
    return min(leading, x.dim() if x.dtype == torch.bool else x.dim() - 1)


def _form(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Hashable | None:
    """Return the key of the compiled form for these arguments; None for fewer than two rows, which run uncompiled.

    torch specializes on a size of one, so a single sample has separate forms.
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
    """Mark the sizes that will change as dynamic, before torch compiles for the sizes of this call."""
    for x, leading in zip(arguments, getattr(function, _COUNTED, ()), strict=False):
        if isinstance(x, Tensor):
            for dim in range(_counts(x, leading)):
                if x.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(x, dim)
