"""Up to which iteration each check of a run has found nothing wrong, as checkpoints carry it.

A run keeps that in memory, and every save writes it down: a check that passes vouches for the checkpoints before it
too, which learn of it by the next one. A run that is killed in between knows less than it did, never more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megapar.config.suspects import NEVER
from megapar.training.checkpoints.state import Loaded


@dataclass(frozen=True)
class Start:
    """Where this start of a run begins. saved: ``verified`` of the checkpoint that it goes on from, if it has any."""

    iteration: int = 0
    saved: Any = None

    @classmethod
    def after(cls, loaded: Loaded | None) -> Start:
        """With what a run goes on from; None: from scratch."""
        return cls() if loaded is None else cls(loaded.progress.iteration, loaded.scalars.get("verified"))

    def verified(self, names: Sequence[str]) -> dict[str, int]:
        """For each check: what the checkpoint says, but no later than it was taken; what a run begins with is right."""
        return {name: 0 if self.iteration == 0 else self._of(name) for name in names}

    def _of(self, name: str) -> int:
        at = self.saved.get(name) if isinstance(self.saved, Mapping) else None
        return min(at, self.iteration) if isinstance(at, int) and at >= 0 else NEVER
