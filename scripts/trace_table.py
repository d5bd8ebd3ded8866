"""Parts of the traces of all kinds of devices: calls of the operator table, places of errors, the last lines."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from megapar.core.device import ops


@contextmanager
def counted(calls: Counter[str], device: str) -> Iterator[None]:
    """Count calls of a device's entries by operator."""

    def watched(name: str, form: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return form(*args, **kwargs)

        return call

    table = {
        name: {**forms, device: watched(name, forms[device])} if device in forms else forms
        for name, forms in ops.OPS.items()
    }
    with patch.object(ops, "OPS", MappingProxyType(table)):
        yield


def described(error: Exception) -> str:
    """Return an error with the innermost line of megapar that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}megapar{os.sep}" in f.filename]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "outside megapar"
    return f"{place}: {type(error).__name__}: {str(error)[:300]}"


def never_called(calls: Counter[str], device: str) -> list[str]:
    """Return a complaint for each entry of a device that no run has called."""
    entries = (name for name, forms in ops.OPS.items() if device in forms)
    return [f"{name} of the operator table was never called" for name in entries if not calls[name]]


def report(script: str, problems: Sequence[str], summary: str) -> int:
    """Print the problems and the last line. Return the exit status."""
    for problem in problems:
        print(f"{script}: WRONG: {problem}")
    print(f"{script}: {summary}: {f'{len(problems)} problems' if problems else 'all right'}")
    return 1 if problems else 0
