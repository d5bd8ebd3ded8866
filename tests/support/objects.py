"""Bytes of this process's Python objects."""

from __future__ import annotations

import gc
import sys
from collections import deque
from typing import Any


def object_bytes() -> int:
    """Return the bytes of all objects that the collector knows and of what they hold, without tensors' storages."""
    gc.collect()
    seen: set[int] = set()
    total = 0
    todo: deque[Any] = deque(gc.get_objects())
    while todo:
        one = todo.popleft()
        if id(one) in seen or one is seen or one is todo:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one, 0)
        if not gc.is_tracked(one):
            continue  # it holds nothing that is not counted with it
        todo.extend(inner for inner in gc.get_referents(one) if not gc.is_tracked(inner) and id(inner) not in seen)
    return total
