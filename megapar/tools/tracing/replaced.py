"""Attributes of other modules, replaced for a while: for what torch offers no way to choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``, for all threads. Raises AttributeError where the owner has no such name."""
    own = name in vars(owner)  # otherwise of its class, which then keeps it
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
