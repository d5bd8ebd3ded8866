"""What units keep: the same tensors come back, from pieces, from host memory and from both; nothing more is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.accounts import CommBytes
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.base import Device
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import Interval
from megapar.core.recompute.saved_inputs import SavedInputs
from tests.support.lazy import LazyDevice
from tests.support.ranks import run_ranks

UNITS = 6


def make_axis(rank: int, world_size: int) -> Axis:
    """All ranks on mp."""
    if world_size == 1:
        return Axis.single("mp")
    return Axis("mp", world_size, rank, dist.group.WORLD, tuple(range(world_size)))


def unit(x: Tensor, plan: Tensor, keep: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Two inputs that change from unit to unit, with gradient and without, and one that stays."""
    assert name == "unit"
    return (x * 1.5).sin() * keep.t()[: x.shape[0], : x.shape[1]].to(x.dtype), plan + 1, keep


def chain(recompute: Recompute | None, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """(output, sum of the plans) of all units."""
    plan = torch.arange(7)
    forward = None if recompute is None else recompute.begin()
    for _ in range(UNITS):
        inputs = (x, plan, keep, "unit")
        x, plan, keep = unit(*inputs) if forward is None else forward.run(unit, *inputs)
    return x, plan


def keeps(rank: int, world_size: int, partition: bool, offload: bool, newest: int, lazy: bool) -> dict[str, Any]:
    """Two micro-batches forward, then their backwards, as a pipeline runs them; then one alone."""
    if not lazy:
        return kept(Device(), rank, world_size, partition, offload, newest)
    with LazyDevice() as device:
        found = kept(device, rank, world_size, partition, offload, newest)
        device.settle()
    return found


def kept(device: Device, rank: int, world_size: int, partition: bool, offload: bool, newest: int) -> dict[str, Any]:
    """On a device."""
    comm = CommContext(device=device)
    mp = make_axis(rank, world_size) if partition else Axis.single("mp")
    saved_inputs = SavedInputs(device, mp, comm, offload=offload, newest=newest)
    recompute = Recompute(Interval(1), comm, CommBytes(), saved_inputs)
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    keep = torch.rand(4, 5, generator=generator) > 0.2
    host = []
    for _ in range(2):
        outputs = [chain(recompute, x, keep)[0] for x in xs]
        for output in outputs:
            output.sum().backward()
        host.append(saved_inputs.host_bytes)
    got = [x.grad for x in xs]
    for x in xs:
        x.grad = None
    for _ in range(2):
        for x in xs:
            chain(None, x, keep)[0].sum().backward()
    same = [torch.equal(a, b.grad) for a, b in zip(got, xs, strict=True) if a is not None and b.grad is not None]
    return {"same": same, "host": host, "open": comm.in_flight, "launched": dict(comm.launched)}


@pytest.mark.parametrize("newest", [1, 2])
@pytest.mark.parametrize("lazy", [False, True])
def test_offloaded(lazy: bool, newest: int) -> None:
    """Host memory is taken once and used again; copies are waited for in both directions."""
    got = keeps(0, 1, False, True, newest, lazy)
    assert got["same"] == [True, True]
    assert got["host"][0] > 0
    assert got["host"][0] == got["host"][1]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("world_size", "newest"), [(2, 2), (2, 1), (3, 1)])
def test_partitioned(world_size: int, newest: int, offload: bool) -> None:
    """Sizes that do not divide; gathers in flight under another unit, over two micro-batches at once."""
    for got in run_ranks(world_size, keeps, True, offload, newest, True, backend="late"):
        assert got["same"] == [True, True]
        assert got["open"] == []
        fetched = 2 * (2 * UNITS - newest)  # twice two micro-batches, of which the newest units stayed whole
        assert got["launched"] == {"all_gather": 3 * fetched}
        assert (got["host"][0] > 0) == offload
        assert got["host"][0] == got["host"][1]


def holds(rank: int, world_size: int, partition: bool, offload: bool) -> tuple[int, int, int]:
    """(bytes after the forward, peak of the backward, host bytes), in units of one kept tensor."""
    size = 12_000
    comm = CommContext()
    saved_inputs = None
    device = Device()
    with MemoryTracker() as tracker:

        def on_host(numel: int, dtype: torch.dtype) -> Tensor:
            buffer = torch.zeros(numel, dtype=dtype)
            tracker.forget(buffer)
            return buffer

        device.pinned_zeros = on_host  # type: ignore[method-assign]
        if partition or offload:
            mp = make_axis(rank, world_size) if partition else Axis.single("mp")
            saved_inputs = SavedInputs(device, mp, comm, offload=offload)
        forward = Recompute(Interval(1), comm, CommBytes(), saved_inputs).begin()
        x: Tensor = torch.ones(size, dtype=torch.uint8).to(torch.float32).requires_grad_()
        start = x
        for _ in range(12):
            x = forward.run(torch.sin, x)
        after = tracker.bytes
        x.sum().backward()
        peak = tracker.peak_bytes
        del x, start
    return after // (4 * size), peak // (4 * size), 0 if saved_inputs is None else saved_inputs.host_bytes // (4 * size)


def test_what_is_held() -> None:
    """Twelve units: all inputs, or those of the newest two; a quarter of the others, or nothing of them."""
    plain, partition, offload, both = (
        run_ranks(4, holds, *options)[0] for options in ((False, False), (True, False), (False, True), (True, True))
    )
    assert plain[0] == 13  # twelve inputs and the output
    assert offload[0] == both[0] == 4  # the first, which has a name, the newest two and the output
    assert partition[0] == 6  # and ten quarters
    assert plain[1] > partition[1] > offload[1] >= both[1]
    assert [kept[2] for kept in (plain, partition, offload, both)] == [0, 0, 12, 3]
