"""The last iteration that each check has verified, as checkpoints record it.

A run keeps these iterations in memory, and every save writes them. A check that passes also verifies the checkpoints
before it, and the next checkpoint records that. After a kill in between, less is known to be verified, never more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megapar.files.suspects import NEVER
from megapar.training.checkpoints.state import Loaded


@dataclass(frozen=True)
class Start:
    """The iteration at which this start of a run begins.

    Attributes:
        iteration: Last iteration done before this start.
        saved: ``verified`` of the checkpoint that the run resumes from. None if it has none.
    """

    iteration: int = 0
    saved: Any = None

    @classmethod
    def after(cls, loaded: Loaded | None) -> Start:
        """Return the start of a run that resumes from ``loaded``, or from scratch if that is None."""
        return cls() if loaded is None else cls(loaded.progress.iteration, loaded.scalars.get("verified"))

    def verified(self, names: Sequence[str]) -> dict[str, int]:
        """Return check -> last verified iteration, as the checkpoint records it but at most its own iteration.

        At iteration 0 everything counts as verified.
        """
        return {name: 0 if self.iteration == 0 else self._of(name) for name in names}

    def _of(self, name: str) -> int:
        at = self.saved.get(name) if isinstance(self.saved, Mapping) else None
        return min(at, self.iteration) if isinstance(at, int) and at >= 0 else NEVER
