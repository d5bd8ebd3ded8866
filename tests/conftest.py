"""What is drawn is the same in every run, workers of pytest-xdist keep to cores of their own, and no collection of
garbage looks at what was imported. ``CI_SHARE`` draws from the tables, never from the suite.
"""

from __future__ import annotations

import gc
import os
import random
import sys

import pytest
from hypothesis import settings

from tests.support.buckets import bucket, s3_server
from tests.support.shares import is_drawn
from tests.support.stores import any_store, store_root

__all__ = ["any_store", "bucket", "s3_server", "store_root"]

TABLES = ("table", "flags", "presets")  # markers of what is drawn from


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every line that a run says."""
    from megapar.training.reports.terminal import PlainTerminal

    lines: list[str] = []
    monkeypatch.setattr(PlainTerminal, "print_message", lambda self, text: lines.append(text))
    return lines


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples in every run, and give this worker, and every rank that it starts, its share of the cores.

    A change is judged by what it changed, on every machine; ``--hypothesis-profile default`` draws new examples. Ranks
    of two tests on the same cores wait for each other's turns whenever they meet, which takes longer than one test
    after the other.
    """
    if not config.getoption("--hypothesis-profile"):
        settings.register_profile("same", derandomize=True, deadline=None, database=None, print_blob=True)
        settings.load_profile("same")
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if worker is None or count is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw")) % int(count) :: int(count)]
    if own:
        os.sched_setaffinity(0, own)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start the generators as those of the ranks are: a test draws the same alone, among others and on each try."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:  # a test of what needs no torch does not wait for it
        torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the share of the tables that was asked for."""
    kept, left = [], []
    for item in items:
        runs = is_drawn(item.nodeid) or not any(map(item.get_closest_marker, TABLES))
        (kept if runs else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of all collections of garbage: it lives until the end.

    Each of those that a trace of a step asks for would look at it, three quarters of a million objects.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let what was left out be collected at the end of the process, where libraries look for what they have lost."""
    gc.unfreeze()
