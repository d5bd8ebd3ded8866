"""Values in messages: enough of them to be found again, never all of what a file may hold."""

from __future__ import annotations

import reprlib
from typing import Any

_DIGITS = 80
_BITS = 1000  # a number of more is not written out: Python refuses to, or takes seconds


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """A whole number, or how long it is."""
        if abs(x).bit_length() > _BITS:
            return f"a number of about {int(abs(x).bit_length() * 0.30103) + 1:,} digits"
        return super().repr_int(x, level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = _DIGITS
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """``repr`` of a value as it comes from JSON, YAML or a line, at most some hundred characters."""
    return _SHORT.repr(value)
