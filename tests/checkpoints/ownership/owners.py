"""What tests ask with for a folder, and how they watch: by a clock that runs when it is waited for."""

from __future__ import annotations

from typing import Any

from megapar.checkpoints.ownership.owner import Lease, Watch
from megapar.health.stop.process import Process


def claim(**changed: Any) -> Lease:
    """Who asks."""
    known = {"process": Process.here(), "name": "a", "launch": "", "round": 0, "slurm": ("", 0)}
    return Lease(**{"epoch": 0, **known, "user": "u", "since": "now", **changed})


class Waiting:
    """A watch whose seconds pass at once. told: what people were told; seconds: that passed."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.seconds = 0.0

    def pause(self, seconds: float) -> None:
        """Let them pass."""
        self.seconds += seconds

    @property
    def watch(self) -> Watch:
        """For ``take``."""
        return Watch(self.told.append, lambda: self.seconds, self.pause)
