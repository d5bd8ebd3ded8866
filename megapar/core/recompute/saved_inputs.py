"""Inputs that recomputed units keep: cut over mp, in host memory, or both.

    forward    unit 0   unit 1   unit 2   unit 3   unit 4
    kept       stored   stored   stored   whole    whole        the newest ones stay as they are, for the copies to
    backward                              4, 3: nothing to do   host memory take a while, and the backward begins here
               2: begin fetching 1, then wait for its own, begun when unit 3 began; 1: begin fetching 0 ..

So at any time two units' inputs are whole on the device, in the forward as in the backward, and what travels has the
time of a whole unit. Stored is this rank's piece of a tensor that all ranks of mp hold alike (gathered back), or a copy
in pinned host memory, or a copy of the piece there.

Everything here is saved-tensor hooks, so that it applies to any number of tensors of any shape.
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

NEWEST = 2


class SavedInputs:
    """Keeps the inputs of the units of a model.

    mp: each of its ranks keeps a piece; the inputs must be the same on all of them. An axis of one rank keeps all.
    offload: into pinned host memory. newest: how many units stay whole, 1 or more.
    """

    def __init__(self, device: Device, mp: Axis, comm: CommContext, *, offload: bool, newest: int = NEWEST) -> None:
        self.device, self.mp, self.comm = device, mp, comm
        self.host = BufferPool(device.pinned_zeros, most=2) if offload else None
        self.going, self.coming = device.new_stream(), device.new_stream()
        self._newest = newest
        self._whole: deque[weakref.ref[SavedUnit]] = deque()

    @property
    def host_bytes(self) -> int:
        """Pinned host memory allocated so far; what is given back is used again."""
        return 0 if self.host is None else self.host.bytes

    def enter(self, before: SavedUnit | None) -> SavedUnit:
        """Return the next unit of a forward, whose backward comes just before that of ``before``."""
        unit = SavedUnit(self, before)
        self._whole.append(weakref.ref(unit))
        while len(self._whole) > self._newest:
            oldest = self._whole.popleft()()
            if oldest is not None:
                oldest.store()
        return unit


class SavedUnit:
    """The kept tensors of one unit, which live as long as its graph does."""

    def __init__(self, keeper: SavedInputs, before: SavedUnit | None) -> None:
        self._keeper = keeper
        self._before = before
        self._tensors: list[weakref.ref[SavedTensor]] = []

    def hooks(self) -> saved_tensors_hooks:
        """Surrounds what saves the unit's inputs."""
        return saved_tensors_hooks(self.keep, self.whole)

    def store(self) -> None:
        """Keep pieces or copies only."""
        for kept in self._alive():
            kept.store()

    def fetch(self) -> None:
        """Begin to bring everything back."""
        for kept in self._alive():
            kept.fetch()

    def _alive(self) -> list[SavedTensor]:
        return [kept for kept in (reference() for reference in self._tensors) if kept is not None]

    def keep(self, tensor: Tensor) -> SavedTensor | Tensor:
        """Return what the unit keeps of a tensor."""
        if not tensor.numel():
            return tensor
        kept = SavedTensor(self._keeper, tensor)
        self._tensors.append(weakref.ref(kept))
        return kept

    def whole(self, kept: SavedTensor | Tensor) -> Tensor:
        """The tensor of which that was kept; everything else begins to come back."""
        if isinstance(kept, Tensor):
            return kept
        self.fetch()
        if self._before is not None:
            self._before.fetch()
        return kept.whole()


class SavedTensor:
    """One tensor: whole, stored, or on its way back."""

    def __init__(self, keeper: SavedInputs, tensor: Tensor) -> None:
        self._keeper = keeper
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        flat, self._stride = _flatten(tensor.detach())
        self._numel = flat.numel()
        self._length = -(-self._numel // keeper.mp.size)
        self._flat: Tensor | None = flat
        self._piece: Tensor | None = None  # on the device
        self._host: Tensor | None = None
        self._sent: Any = None  # event: the copy in host memory is there
        self._back: Any = None  # event: the copy on the device is there
        self._flight: InFlight | None = None
        if keeper.host is not None:
            self._send(keeper.host, flat)

    def store(self) -> None:
        """Give the whole tensor up."""
        if self._flat is None:
            return
        if self._host is not None:
            # Its memory may be used again only after the copy.
            self._keeper.device.current_stream().wait_event(self._sent)
        else:
            self._piece = self._own(self._flat).clone()
        self._flat = None

    def fetch(self) -> None:
        """Begin to bring it back, if that is not done."""
        if self._flat is not None or (self._piece is None and self._host is None):
            return
        keeper, size = self._keeper, self._keeper.mp.size
        # Allocated here, for the current stream, which will use and free it.
        buffer = torch.empty(size * self._length, dtype=self._dtype, device=self._device)
        own = buffer.narrow(0, keeper.mp.rank * self._length, self._length)
        self._flat = buffer.narrow(0, 0, self._numel)
        if self._host is None:
            assert self._piece is not None
            own[: self._piece.numel()].copy_(self._piece)
            self._flight = keeper.comm.launch(AllGather(keeper.mp, buffer), own, owned=True)
            return
        keeper.coming.wait_stream(keeper.device.current_stream())
        with keeper.coming:
            keeper.coming.wait_event(self._sent)
            own[: self._host.numel()].copy_(self._host, non_blocking=True)
            self._back = keeper.coming.record_event()
            if size > 1:
                self._flight = keeper.comm.launch(AllGather(keeper.mp, buffer), own, owned=True)

    def whole(self) -> Tensor:
        """The tensor as it was; the current stream waits for it."""
        self.fetch()
        if self._back is not None:
            self._keeper.device.current_stream().wait_event(self._back)
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._keeper.comm.wait(flight)
        assert self._flat is not None
        return self._flat.as_strided(self._shape, self._stride, self._flat.storage_offset())

    def _own(self, flat: Tensor) -> Tensor:
        """This rank's piece; the last ones may be shorter, or empty."""
        start = min(self._keeper.mp.rank * self._length, self._numel)
        return flat[start : start + self._length]

    def _send(self, pool: BufferPool, flat: Tensor) -> None:
        going, own = self._keeper.going, self._own(flat)
        self._host = pool.take((own.numel(),), self._dtype, going)
        going.wait_stream(self._keeper.device.current_stream())
        with going:
            self._host.copy_(own, non_blocking=True)
            self._sent = going.record_event()

    def __del__(self) -> None:
        host = getattr(self, "_host", None)
        if host is None or self._keeper.host is None:
            return
        if self._flat is not None:
            # As in ``store``: for the newest units this is the only wait for the copy.
            self._keeper.device.current_stream().wait_event(self._back or self._sent)
        self._keeper.host.give(host, self._back)


def _flatten(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(its elements in the order of memory, the strides that make the tensor of them); a copy where it has gaps."""
    dense = torch.empty_like(tensor, device="meta").stride()
    if dense != tensor.stride():
        tensor = tensor.contiguous()
        dense = tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)), dense
