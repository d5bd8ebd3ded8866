"""Counter of the calls of a device's entries in the operator table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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
