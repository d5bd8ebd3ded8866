"""Python's garbage collector, run at the same steps on all ranks.

By default it runs after a rank has allocated enough objects, at a different moment on each rank. With many ranks, one
of them is then always collecting while the other ranks wait for it in the next collective.
"""

from __future__ import annotations

import gc


class Collector:
    """Callback that disables automatic collection between ``open`` and ``close`` and collects every ``interval`` steps.

    Objects that exist at ``open`` are frozen, so that no collection scans them: modules, tables and the model live
    until the end.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def open(self) -> None:
        """Collect once, freeze all objects and disable automatic collection."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def before_step(self, iteration: int) -> None:
        """Do nothing: no collection runs inside a step."""

    def after_step(self, iteration: int) -> None:
        """Collect if it is due, which is the same on every rank."""
        if iteration % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """Restore Python's automatic collection."""
        gc.unfreeze()
        gc.enable()
