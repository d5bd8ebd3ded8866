"""Turns of several steps, measured in processor time of this process."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping

from benchmarks.support.contest import Figures, serve


def serve_steps(ways: Mapping[str, Callable[[], object]]) -> None:
    """Answer requests, "STEPS WAY", with the user, processor and wall time of one of that many steps."""

    def turn(request: str) -> Figures:
        number, way = request.split()
        steps, step = int(number), ways[way]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(steps):
            step()
        after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        return {"user": user / steps, "processor": (user + system) / steps, "seconds": seconds / steps}

    serve(turn)
