"""Parts of plans that the candidates of a search have in common: costs, rows of stages, and times of layers.

A plan outside a search has its own, and shares it with nothing. Keys contain everything that a part depends on, except
the kind of device, what is assumed, and the data, which a search does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Shared:
    """Parts by what they are made from.

    Attributes:
        parts: The parts.
    """

    parts: dict[Hashable, Any] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the part of a key, made if it is missing."""
        if key not in self.parts:
            self.parts[key] = make()
        found: T = self.parts[key]
        return found

    def of(self, owner: object, key: Hashable, make: Callable[[], T]) -> T:
        """Return the part of a key that belongs to ``owner``, made if it is missing or belongs to another object."""
        known = self.parts.get(key)
        if known is None or known[0] is not owner:
            known = self.parts[key] = owner, make()
        found: T = known[1]
        return found
