"""Inputs that recomputed units keep: sharded over mp, offloaded to host memory, or both.

    forward    unit 0   unit 1   unit 2   unit 3   unit 4
    kept       stored   stored   stored   whole    whole        the newest stay whole: copies to the host take time,
    backward                              4, 3: nothing to do   and the backward begins here
               2: begin fetching 1, then wait for its own fetch, which began with unit 3; 1: begin fetching 0 ..

At any time the inputs of two units are whole on the device, in the forward and in the backward, and every transfer has
the duration of a unit to complete. A stored tensor is this rank's shard of a tensor that is the same on all ranks of mp
(all-gathered when fetched), or a copy in pinned host memory, or a copy of the shard there.

Everything here is saved-tensor hooks, so it applies to any number of tensors of any shape.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megapar.core.comm.axis import Axis
from megapar.core.comm.buffers import BufferPool
from megapar.core.comm.exchange import AllGather
from megapar.core.comm.in_flight import CommContext, InFlight
from megapar.core.device.base import Device
from megapar.core.recompute.choice import NEWEST_WHOLE


class SavedInputs:
    """Storage for the inputs of a model's recomputed units.

    Args:
        mp: Each rank keeps a shard; inputs must be the same on all its ranks. An axis of one rank keeps whole tensors.
        newest: Number of units that stay whole, at least 1.
    """

    def __init__(
        self, device: Device, mp: Axis, comm: CommContext, *, offload: bool, newest: int = NEWEST_WHOLE
    ) -> None:
        self.device, self.mp, self.comm = device, mp, comm
        self.host = BufferPool(device.pinned_zeros, most=2) if offload else None
        self.to_host, self.to_device = device.new_stream(), device.new_stream()
        self._newest = newest
        self._whole: deque[weakref.ref[SavedUnit]] = deque()

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory allocated so far; returned buffers are reused."""
        return 0 if self.host is None else self.host.bytes

    def enter(self, before: SavedUnit | None) -> SavedUnit:
        """Return the next unit of a forward. before: the previous unit, whose backward follows this one's."""
        unit = SavedUnit(self, before)
        self._whole.append(weakref.ref(unit))
        while len(self._whole) > self._newest:
            oldest = self._whole.popleft()()
            if oldest is not None:
                oldest.store()
        return unit


class SavedUnit:
    """The kept tensors of one unit, which live as long as its graph."""

    def __init__(self, saved: SavedInputs, before: SavedUnit | None) -> None:
        self._saved = saved
        self._before = before
        self._tensors: list[weakref.ref[SavedTensor]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which the unit's inputs are saved."""
        return saved_tensors_hooks(self.keep, self.whole)

    def store(self) -> None:
        """Free the whole tensors; keep only shards or host copies."""
        for kept in self._alive():
            kept.store()

    def fetch(self) -> None:
        """Launch the fetches of all tensors."""
        for kept in self._alive():
            kept.fetch()

    def _alive(self) -> list[SavedTensor]:
        return [kept for kept in (reference() for reference in self._tensors) if kept is not None]

    def keep(self, tensor: Tensor) -> SavedTensor | Tensor:
        """Return the stored form of a tensor."""
        if not tensor.numel():
            return tensor
        kept = SavedTensor(self._saved, tensor)
        self._tensors.append(weakref.ref(kept))
        return kept

    def whole(self, kept: SavedTensor | Tensor) -> Tensor:
        """Return the original tensor; launch the fetches of the unit's other tensors and of the previous unit."""
        if isinstance(kept, Tensor):
            return kept
        self.fetch()
        if self._before is not None:
            self._before.fetch()
        return kept.whole()


class SavedTensor:
    """One kept tensor: whole, stored, or being fetched."""

    def __init__(self, saved: SavedInputs, tensor: Tensor) -> None:
        self._saved = saved
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        flat, self._stride = _flatten(tensor.detach())
        self._numel = flat.numel()
        self._length = -(-self._numel // saved.mp.size)
        self._flat: Tensor | None = flat
        self._piece: Tensor | None = None  # on the device
        self._host: Tensor | None = None
        self._sent: Any = None  # event: the copy to host memory is complete
        self._back: Any = None  # event: the copy back to the device is complete
        self._flight: InFlight | None = None
        if saved.host is not None:
            self._send(saved.host, flat)

    def store(self) -> None:
        """Release the whole tensor; keep a shard or the host copy."""
        if self._flat is None:
            return
        if self._host is not None:
            # Its memory may be reused only after the copy.
            self._saved.device.current_stream().wait_event(self._sent)
        else:
            self._piece = self._shard(self._flat).clone()
        self._flat = None

    def fetch(self) -> None:
        """Launch the fetch, unless the tensor is whole or being fetched."""
        if self._flat is not None or (self._piece is None and self._host is None):
            return
        saved, size = self._saved, self._saved.mp.size
        # Allocated on the current stream, which will use and free it.
        buffer = torch.empty(size * self._length, dtype=self._dtype, device=self._device)
        shard = buffer.narrow(0, saved.mp.rank * self._length, self._length)
        self._flat = buffer.narrow(0, 0, self._numel)
        if self._host is None:
            assert self._piece is not None
            shard[: self._piece.numel()].copy_(self._piece)
            self._flight = saved.comm.launch(AllGather(saved.mp, buffer), shard, owned=True)
            return
        saved.to_device.wait_stream(saved.device.current_stream())
        with saved.to_device:
            saved.to_device.wait_event(self._sent)
            shard[: self._host.numel()].copy_(self._host, non_blocking=True)
            self._back = saved.to_device.record_event()
            if size > 1:
                self._flight = saved.comm.launch(AllGather(saved.mp, buffer), shard, owned=True)

    def whole(self) -> Tensor:
        """Return the original tensor, after making the current stream wait for it."""
        self.fetch()
        if self._back is not None:
            self._saved.device.current_stream().wait_event(self._back)
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._saved.comm.wait(flight)
        assert self._flat is not None
        return self._flat.as_strided(self._shape, self._stride, self._flat.storage_offset())

    def _shard(self, flat: Tensor) -> Tensor:
        """Return this rank's shard; those of the last ranks may be shorter, or empty."""
        start = min(self._saved.mp.rank * self._length, self._numel)
        return flat[start : start + self._length]

    def _send(self, pool: BufferPool, flat: Tensor) -> None:
        to_host, shard = self._saved.to_host, self._shard(flat)
        self._host = pool.take((shard.numel(),), self._dtype, to_host)
        to_host.wait_stream(self._saved.device.current_stream())
        with to_host:
            self._host.copy_(shard, non_blocking=True)
            self._sent = to_host.record_event()

    def __del__(self) -> None:
        host = getattr(self, "_host", None)
        if host is None or self._saved.host is None:
            return
        if self._flat is not None:
            # As in ``store``. For the newest units this is the only wait for the copy.
            self._saved.device.current_stream().wait_event(self._back or self._sent)
        self._saved.host.give(host, self._back)


def _flatten(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return (the elements in memory order, the strides that restore the tensor); copies a tensor with gaps."""
    dense = torch.empty_like(tensor, device="meta").stride()
    if dense != tensor.stride():
        tensor = tensor.contiguous()
        dense = tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)), dense
