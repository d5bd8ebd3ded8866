"""Python's garbage collector at steps of our choosing.

Left to itself it runs when a rank has made enough objects, at another moment on each: with many ranks somebody always
collects while the others wait for it in the next collective.
"""

from __future__ import annotations

import gc


class Collector:
    """Off between ``open`` and ``close``, but for every ``interval``-th step. What was there at ``open`` is never
    looked at again: modules, tables and the model live to the end.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def open(self) -> None:
        """Collect once, and take over."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def before_step(self, iteration: int) -> None:
        """Nothing: a step runs without it."""

    def after_step(self, iteration: int) -> None:
        """Collect where it is due; the same on every rank."""
        if iteration % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """As Python does it again."""
        gc.unfreeze()
        gc.enable()
