"""Saves that a thread makes."""

from __future__ import annotations

import threading

import torch

from megapar.core.checkpoint.background import Background
from megapar.core.checkpoint.shard import Shard
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
    assert written is not None
    assert written.error is None
    assert torch.equal(found["x"].tensor, whole)
    assert threading.get_ident() not in device.threads
