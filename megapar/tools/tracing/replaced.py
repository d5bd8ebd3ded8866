"""Temporary replacement of attributes of other modules, where torch offers no option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` in the context, for all threads. Raises AttributeError if it does not exist."""
    own = name in vars(owner)  # otherwise an attribute of its class, which keeps it
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
