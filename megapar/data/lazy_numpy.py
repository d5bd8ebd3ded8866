"""numpy, imported when it is first used: entry scripts import this package before they accept a configuration."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            value = self.__dict__[name] = getattr(import_module("numpy"), name)
            return value

    np = _Numpy()
