"""Values in messages: enough of a value to find it again, never the whole of a large one."""

from __future__ import annotations

import reprlib
from typing import Any

_DIGITS = 80
_BITS = 1000  # a larger number is not printed in full: Python refuses to, or takes seconds


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return a whole number, or its approximate number of digits if it is very large."""
        if abs(x).bit_length() > _BITS:
            return f"a number of about {int(abs(x).bit_length() * 0.30103) + 1:,} digits"
        return super().repr_int(x, level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlong = _DIGITS
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """Return ``repr`` of a value from JSON, YAML or the command line, shortened to some hundred characters."""
    return _SHORT.repr(value)
