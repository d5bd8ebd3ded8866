"""Saves that a thread makes."""

from __future__ import annotations

import threading

import torch

from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.save_load.background import Background, SaveFailures
from megapar.core.device.base import Device


class Chosen(Device):
    """Notes which threads have chosen it before they used it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def prepare_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def launch(self, op, stream=None, after=None):
        assert threading.get_ident() in self.threads, "this thread would use the process's first device"
        return op()


def test_the_thread_of_a_save_chooses_its_rank_s_device():
    device, found = Chosen(), {}
    saves = Background(device)
    whole = torch.arange(6.0)
    saves.begin({"x": Shard.whole("x", whole)}, found.update)
    saves.wait_for_copy()
    written = saves.join()
    assert written.error is None
    assert torch.equal(found["x"].tensor, whole)
    assert threading.get_ident() not in device.threads


def test_each_one_in_a_row_is_told_more_plainly() -> None:
    now = [0.0]
    failures = SaveFailures(lambda: now[0])
    assert failures.saved("iter_0000002") == ""
    lines = []
    for number in range(3):
        now[0] += 3600
        lines.append(failures.failed(f"iter_000000{4 + 2 * number}", OSError("full")))
    assert lines[0] == "WARNING: iter_0000004 was not saved: full"
    assert lines[1].startswith("WARNING: iter_0000006 was not saved, the 2nd checkpoint in a row: full. For 2:00:00 ")
    assert lines[2].startswith("ERROR: iter_0000008 was not saved, the 3rd checkpoint in a row")
    assert "the newest one is iter_0000002, and all training since then is lost" in lines[2]
    assert failures.in_a_row == 3
    assert failures.saved("iter_0000010") == "checkpoints are written again: 3 before iter_0000010 were not"
    assert failures.in_a_row == 0
    failures = SaveFailures()
    assert "this start has not saved any" in [failures.failed(name, OSError()) for name in "ab"][1]
