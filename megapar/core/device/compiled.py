"""Execution of the pure functions of layers: the code between two launches of collectives, without modules.

A module passes a function and its arguments to ``run``. ``plain`` calls it. ``Compiled`` compiles each function once
for all layers, because weights are arguments, and as a whole, without graph breaks. Whole blocks are never compiled,
because sharding's hooks do not run under dynamo and tickets break graphs.

The number of samples, positions or rows can differ from step to step: ``counted`` marks these dims.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol, TypeVar

import torch
import torch._functorch.config
from torch import Tensor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class FunctionRunner(Protocol):
    """Caller of functions of tensors and numbers that launch no collectives and draw no random numbers."""

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function and return its result."""


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
    which applies to each code object. Beyond ``most_forms`` of a function compilation does not pay off. Calls with
    fewer than two rows run uncompiled.

    Attributes:
        functions: Plain function -> its compiled forms.
        given_up: Names of functions that run uncompiled, because they could not be compiled or needed too many forms.
        unshared: Names of those that the other ranks of the run do not know of yet; see ``give_up``.
    """

    def __init__(self, backend: str = "inductor", most_forms: int = 64) -> None:
        self.functions: dict[Callable[..., Any], dict[Hashable, Callable[..., Any]]] = {}
        self.given_up: set[str] = set()
        self.unshared: set[str] = set()
        self._backend, self._most_forms = backend, most_forms

    def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function, compiled at the first call of each form.

        If compiling fails, it runs uncompiled from then on, with one warning per function.
        """
        forms = self.functions.setdefault(function, {})
        form = None if function.__qualname__ in self.given_up else _form(function, arguments)
        if form is None:
            return function(*arguments)
        new = form not in forms
        try:
            if new:
                forms[form] = self._make(function, len(forms))
                result: T = self._first_call(function, forms[form], arguments)
            else:
                result = forms[form](*arguments)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not (new or isinstance(error, _OF_COMPILER)):
                raise
            self._give_up(function, error)
            return function(*arguments)
        return result

    def _first_call(self, function: Callable[..., T], form: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        """Compile and call a form, with its backward, which torch would otherwise compile in the backward.

        There a failure would end the run. Generated kernels are also built and tried here, so any error of a first
        call may be the compiler's; an error of the function itself is raised again by the uncompiled call.

        Only the marked sizes are dynamic. torch would also make those dynamic that it has seen to differ, even in
        another model of the process: attention with a dynamic number of heads does not compile.
        """
        _mark(function, arguments)
        with (
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
            torch._dynamo.config.patch(automatic_dynamic_shapes=False),
        ):
            result: T = form(*arguments)
        return result

    def give_up(self, names: Iterable[str]) -> None:
        """Run the functions of these names uncompiled from now on: those that any rank runs uncompiled."""
        self.given_up.update(names)
        self.unshared.clear()

    def _give_up(self, function: Callable[..., Any], error: Exception) -> None:
        self.given_up.add(function.__qualname__)
        self.unshared.add(function.__qualname__)
        reason = _reason(error)
        message = f"{function.__name__} runs uncompiled from now on ({reason}); the numbers are the same"
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _make(self, function: Callable[..., T], number: int) -> Callable[..., T]:
        if number == self._most_forms:
            raise _TooManyError(f"it was compiled {number} times")
        # torch caches compiled code and observed sizes by code object and its name, so each form needs a new name.
        code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
        form = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
        return torch.compile(form, fullgraph=True, backend=self._backend)


class _TooManyError(Exception):
    """A function has too many forms."""


# Errors of calls after the first one that do not come from the function itself.
_OF_COMPILER = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


def failed_trial(device: torch.device, backend: str = "inductor") -> str:
    """Compile and run a small kernel. Return the reason if that fails, else ""."""
    try:
        x = torch.ones(64, device=device)
        torch.compile(lambda x: x + x, fullgraph=True, backend=backend)(x)
    except Exception as error:
        return f"the compiler fails on a trial kernel ({_reason(error)})"
    return ""


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


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
