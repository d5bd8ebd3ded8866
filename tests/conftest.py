"""Workers of pytest-xdist keep to cores of their own."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    """Give this worker, and every rank that it starts, its share of the cores.

    Ranks of two tests on the same cores wait for each other's turns whenever they meet, which takes longer than one
    test after the other.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if worker is None or count is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw")) % int(count) :: int(count)]
    if own:
        os.sched_setaffinity(0, own)
