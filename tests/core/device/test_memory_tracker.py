"""The tracker against sums that one can do in the head."""

from __future__ import annotations

import torch
from torch import nn

from megapar.core.device.memory_tracker import MemoryTracker

KILOBYTE = 1024


def test_makes_frees_and_views() -> None:
    """A storage counts once, from its making to its end; views are free."""
    with MemoryTracker() as tracker:
        a = torch.empty(256)
        b = torch.empty(512)
        view = b[3:]
        assert tracker.bytes == 3 * KILOBYTE
        del b
        assert tracker.bytes == 3 * KILOBYTE
        del view
        assert tracker.bytes == KILOBYTE
        a.add_(1)
        assert tracker.bytes == KILOBYTE
    assert tracker.peak_bytes == 3 * KILOBYTE


def test_what_autograd_keeps_is_live_until_the_backward() -> None:
    """Saved activations have no Python name."""
    x = torch.ones(256, requires_grad=True)
    with MemoryTracker() as tracker:
        y = x.exp().sin().sum()  # exp keeps its output, which sin keeps as its input
        assert tracker.bytes == KILOBYTE + 4
        y.backward()
        tracker.reset_peak()
        del y
        assert tracker.bytes == KILOBYTE  # the gradient
        assert tracker.peak_bytes == KILOBYTE + 4


def test_forgotten_storages_and_earlier_ones_do_not_count() -> None:
    """Host memory, and what was there before."""
    linear, before = nn.Linear(16, 16), torch.zeros(256)
    with MemoryTracker() as tracker:
        host = torch.zeros(256)
        tracker.forget(host)
        torch.exp(host, out=before)
        linear.weight.data.mul_(2.0)
        assert tracker.bytes == 0
        x = torch.ones(2, 16)
        y = linear(x)
        assert tracker.bytes == x.nbytes + y.nbytes
        del host
        assert tracker.bytes == x.nbytes + y.nbytes


def test_resized_storages_count_with_the_size_they_have() -> None:
    """As gathered parameters do, whose memory comes and goes under one tensor."""
    with MemoryTracker() as tracker:
        a = torch.empty(256)
        with MemoryTracker() as inner:
            a.untyped_storage().resize_(0)
            assert (tracker.bytes, inner.bytes) == (0, 0)
            b = torch.empty(256)
            a.untyped_storage().resize_(4 * KILOBYTE)
        assert tracker.bytes == 5 * KILOBYTE == tracker.peak_bytes
        del a
        assert tracker.bytes == KILOBYTE == inner.bytes
        del b
    assert tracker.bytes == 0
    c = torch.empty(256)
    c.untyped_storage().resize_(0)
    assert tracker.bytes == 0
