"""How long this rank's host waited for communication."""

from __future__ import annotations

import time

import torch.distributed as dist


class WaitMeter:
    """Sums the seconds spent in ``wait``; on a CPU that is the communication that nothing hid."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wait(self, work: dist.Work) -> None:
        """Wait for a launched collective."""
        start = time.perf_counter()
        work.wait()
        self.seconds += time.perf_counter() - start

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
