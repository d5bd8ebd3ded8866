"""A store of torch's that counts what is asked of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist


class CountedStore:
    """A store of this process.

    Attributes:
        store: The store.
        calls: How often each of its methods was called.
    """

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        """Return the store's method."""
        self.calls[name] += 1
        return getattr(self.store, name)
