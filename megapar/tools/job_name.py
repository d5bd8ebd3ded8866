"""The name of a job that was given none: random, and the same on all of its nodes."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "megapar/launch/"


def launch_name(nodes: int, job: str, store: Store | None) -> str:
    """A name that no other launch has; "" where several nodes have no store to agree by.

    job: the name that was given, for one store may serve several jobs. store: where the nodes meet. A node that comes
    later, or again, hears the same.
    """
    fresh = uuid.uuid4().hex
    if nodes == 1:
        return fresh
    if store is None:
        return ""
    found: bytes = store.compare_set(_KEY + job, "", fresh)
    return found.decode()
