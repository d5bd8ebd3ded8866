"""The optimizer with its state and master weights offloaded to host memory, copied to the device for the update.

The device has two slots; program order of the streams for shards 0, 1, 2, ..:

    in        load 0   load 1             load 2 (after store 0)   ..
    compute            update 0  update 1                update 2
    out                          store 0  store 1                  ..

Source: the optimizer-state offload of Rajbhandari et al. 2021, "ZeRO-Infinity", section 5.2, with the update on the
device. On a CPU, host and device are the same memory: the copies are made, and nothing overlaps with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megapar.core.device.base import Device, Stream
from megapar.core.optimizer.update_rule import CONSTANT, StepRates, Update, UpdateRule
from megapar.core.sharding.master_shard import MasterShard


class SlotReader(Protocol):
    """A reader of each shard's master and states while they are on the device."""

    def arrived(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Read the tensors of shard ``number`` before the update, as they are in host memory."""

    def leaves(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Read the tensors of shard ``number`` after the update."""


class OffloadedOptimizer:
    """The updates of ``Optimizer``, bit for bit, for shards whose masters are in host memory.

    Gradients are on the device. States are pinned host tensors that correspond to ``shards`` one to one.

    Attributes:
        slots: Device memory for the master and the states of two shards, [2, 1 + states, largest shard's elements].
        seen_by: Reader of the tensors while they are on the device; None: no reader.
    """

    def __init__(self, shards: Sequence[MasterShard], device: Device, rule: UpdateRule) -> None:
        self._shards = shards
        self._device = device
        self._rule, self.states = rule, rule.states
        self._states = {
            name: [device.pinned_zeros(shard.master.numel(), shard.master.dtype) for shard in shards]
            for name in rule.states
        }
        largest = max(shard.master.numel() for shard in shards)
        largest += largest % 2  # so that each tensor is aligned to 64-bit integers
        self.slots = torch.empty(
            2, 1 + len(rule.states), largest, dtype=shards[0].master.dtype, device=device.torch_device
        )
        self._step = torch.zeros((), dtype=torch.float32, device=device.torch_device)
        self._in, self._out = device.new_stream(), device.new_stream()
        self.seen_by: SlotReader | None = None

    def step(
        self, lr: float, found_inf: Tensor | None = None, grad_scale: Tensor | None = None, rates: StepRates = CONSTANT
    ) -> None:
        """Update all masters, as ``Optimizer.step``; then the current stream waits for the copies to the host."""
        current = self._device.current_stream()
        self._in.wait_stream(current)
        self._load(0)
        steps = self._step.clone()  # each update increments a copy
        for number, shard in enumerate(self._shards):
            current.wait_stream(self._in)
            if number + 1 < len(self._shards):
                self._load(number + 1)
            if self.seen_by is not None:
                self.seen_by.arrived(number, self._views(number)[1])
            assert shard.grad is not None
            master, *states = ([tensor] for tensor in self._views(number)[1])
            used, step = self._rule.rates(shard, lr, rates), steps.clone()
            self._rule.apply(Update(master, [shard.grad], states, [step], *used, found_inf, grad_scale))
            if self.seen_by is not None:
                self.seen_by.leaves(number, self._views(number)[1])
            self._store(number, current)
        self._step += 1 if found_inf is None else 1 - found_inf
        current.wait_stream(self._out)

    def visit(self) -> None:
        """Copy every shard's master and states to the device for the reader, without changing them."""
        current = self._device.current_stream()
        for number in range(len(self._shards)):
            self._in.wait_stream(current)
            self._load(number)
            current.wait_stream(self._in)
            if self.seen_by is not None:
                self.seen_by.arrived(number, self._views(number)[1])

    def _views(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return a shard's master and states: (in host memory, in its slot)."""
        host = [self._shards[number].master, *(self._states[name][number] for name in self.states)]
        slot = self.slots[number % 2, :, : host[0].numel()]
        return host, list(slot.unbind())

    def _load(self, number: int) -> None:
        # The slot's previous contents must have been stored.
        self._in.wait_stream(self._out)
        with self._in:
            for source, target in zip(*self._views(number), strict=True):
                target.copy_(source, non_blocking=True)

    def _store(self, number: int, current: Stream) -> None:
        self._out.wait_stream(current)
        with self._out:
            for target, source in zip(*self._views(number), strict=True):
                target.copy_(source, non_blocking=True)

    def state(self, name: str) -> list[Tensor]:
        return self._states[name]

    @property
    def num_steps(self) -> int:
        return int(self._step.item())

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        self._step.fill_(float(steps))
