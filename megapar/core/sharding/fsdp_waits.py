"""The collectives of FSDP2's groups, and the waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megapar.core.comm import collectives
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device, Event
from megapar.health.corruption.step_digest import StepDigest


class FsdpWaits:
    """Measures the waits for the collectives of FSDP2's groups, which torch launches and waits for itself.

    On a CPU a collective blocks the host where it is launched. On an accelerator torch lets the stream that computes
    wait, within three methods of a group. In steps that are timed, that stream waits for the same collectives
    immediately before those methods, between two events.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reduced = 0.0
        self._ended: dict[tuple[str, object], tuple[Axis, Event]] = {}

    def launch(self, axis: Axis, kind: str, op: Callable[[bool], dist.Work | None], group: object = None) -> None:
        """Launch a collective.

        Args:
            kind: Its kind, as for the byte counts.
            op: Launches it; asynchronously if called with True.
            group: The owner of a gather, which only this group waits for.
        """
        if self._device.is_async:
            op(False)
            self.ended(axis, kind, group)
        elif (work := op(True)) is not None:
            axis.meter.wait(work, f"{axis.name}/{kind}")
            self._reduced = time.perf_counter()

    def ended(self, axis: Axis, kind: str, group: object = None) -> None:
        """Mark the end of a collective that was launched on the current stream of an accelerator."""
        if self._device.is_async and axis.meter.on:
            self._ended[kind, group] = axis, self._device.event()

    def replicas_summed(self, replica: Axis) -> None:
        """Count the sum over replicas that torch has launched right after a reduce-scatter."""
        self.ended(replica, "all_reduce")
        if not self._device.is_async:
            replica.meter.add(f"{replica.name}/all_reduce", time.perf_counter() - self._reduced)

    def watch(self, module: FSDPModule, gather: object) -> None:
        """Time the waits of a module's group on an accelerator. ``gather``: the owner of its gathers."""
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None and self._device.is_async:
            self._before(group, "wait_for_unshard", ("all_gather", gather))
            self._before(group, "post_backward", ("reduce_scatter", None))
            self._before(group, "finalize_backward", ("reduce_scatter", None), ("all_reduce", None))

    def _before(self, group: Any, name: str, *collectives: tuple[str, object]) -> None:
        """Let the current stream wait for the collectives, if they have been launched, before each call of a method."""
        method = getattr(group, name)

        def timed(*args: Any) -> None:
            for key in collectives:
                if key in self._ended:
                    axis, event = self._ended.pop(key)
                    with axis.waiting(key[0]):
                        self._device.current_stream().wait_event(event)
            method(*args)

        setattr(group, name, timed)


class _Comm:
    """A custom collective of FSDP2: allocates its buffers; subclasses are callable."""

    def __init__(self, axis: Axis, waits: FsdpWaits) -> None:
        self._axis, self._waits = axis, waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer of this size."""
        return torch.empty(*size, dtype=dtype, device=device)


class GroupGather(_Comm):
    """FSDP2's all-gather, routed through ``core.comm.collectives``, which counts its bytes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        def gather(async_op: bool) -> dist.Work | None:
            return collectives.all_gather(output_tensor, input_tensor, self._axis, async_op=async_op)

        assert not async_op
        self._waits.launch(self._axis, "all_gather", gather, self)


class GroupReduction(_Comm):
    """FSDP2's reduce-scatter, routed through ``core.comm.collectives``.

    That counts its bytes, and on gloo sends half of what gloo's reduce-scatter would.

    Attributes:
        step_digest: Records what this rank contributes; None: no recording.
    """

    def __init__(self, axis: Axis, waits: FsdpWaits, unit: str, member: str) -> None:
        super().__init__(axis, waits)
        self._unit, self._member = unit, member
        self.step_digest: StepDigest | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        def reduce(async_op: bool) -> dist.Work | None:
            return collectives.reduce_scatter(output_tensor, input_tensor, self._axis, async_op=async_op)

        assert op == dist.ReduceOp.SUM, op
        assert not async_op
        if self.step_digest is not None:
            self.step_digest.gradient(self._unit, f"the segment of {self._member}", input_tensor)
        self._waits.launch(self._axis, "reduce_scatter", reduce)


def replica_hook(replica: Axis, waits: FsdpWaits) -> Callable[[Tensor], None]:
    """Return a hook that counts the bytes and the wait of the replica sum, which FSDP2 runs itself."""

    def count(gradient: Tensor) -> None:
        collectives.count_all_reduce(gradient, replica)
        waits.replicas_summed(replica)

    return count
