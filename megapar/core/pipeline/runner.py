"""The runner of a schedule: performs this rank's actions one at a time, with messages in the order of both ends.

    RECV_F  an empty buffer, filled while earlier actions run     F  waits for it; keeps what the backward needs
    SEND_F  launched, not waited for                              B  waits for the gradient; sends dx to chunk - 1
    I, W    B in two parts: the gradient of the input, then the gradients of the weights

Messages go through ``Queues``, one for each ordered pair of neighbours.

Schedules are torch's (``schedule``), the runtime is not: torch's allocates the receive buffers of all micro-batches at
once, fixes one shape for a whole run, and its split backward runs the graph twice, collectives included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megapar.core.comm import collectives
from megapar.core.comm.accounts import WaitMeter
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.pipeline import schedule as schedules
from megapar.core.pipeline.schedule import Action, Schedule
from megapar.core.pipeline.stages import Stages
from megapar.core.tensor_parallel.weight_gradients import WeightGradients


class Queues:
    """This rank's ends of its neighbours' queues. ``axes``: (sender, receiver) -> their axis, the sender first."""

    def __init__(self, rank: int, axes: Mapping[tuple[int, int], Axis], device: Device) -> None:
        self.rank = rank
        self._axes = axes
        self._device = device
        self._stream = device.new_stream()
        self._before = device.event()

    def send(self, x: Tensor, to: int) -> dist.Work:
        """Send ``x`` after all computations so far. It must stay unchanged until the returned work is waited for."""
        return collectives.send(x, self._axes[self.rank, to], 1)

    def receive(self, room: Callable[[], Tensor], source: int, *, early: bool = True) -> tuple[Tensor, dist.Work]:
        """Launch a receive; return (buffer, work) for ``finish_receive``.

        early: It waits for no computation; otherwise for those that are launched.

        ``room`` allocates the buffer, on the receive stream. On the compute stream, the allocator could return a block
        that computations have freed but still read, and only waiting for them would make that safe. On the receive
        stream, it returns blocks of earlier receives, and only after the stream that adopted them, in
        ``finish_receive``, has passed their release.
        """
        axis = self._axes[source, self.rank]

        def launch() -> tuple[Tensor, dist.Work]:
            buffer = room()
            return buffer, collectives.receive(buffer, axis, 0)

        # An event from when the queues were made: by default the receive stream would wait for the current stream.
        return self._device.launch(launch, self._stream, after=self._before if early else None)

    def finish_receive(self, buffer: Tensor, work: dist.Work, meter: WaitMeter | None = None) -> Tensor:
        """Return the buffer after making the current stream wait for its message."""
        if meter is None:
            work.wait()
        else:
            meter.wait(work, "pp/receive")
        self._device.adopt(buffer)
        return buffer


Place = tuple[int, int]  # chunk, micro-batch


class StageComputation(Protocol):
    """The computation of the stages; the pipeline only moves activations and gradients."""

    def empty(self, micro_batch: int, chunk: int) -> Tensor:
        """Allocate a buffer for the activations that enter ``chunk``."""

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return (activations for the next chunk, None for the last; this chunk's own loss, or None)."""

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        """Prepare for a micro-batch's gradients of a chunk; called just before its backward."""


@dataclass(frozen=True, eq=False)
class Runner:
    """One run through a schedule; it keeps nothing afterwards.

    Attributes:
        weight_gradients: Passes work from I to W; None for schedules without a split backward.
        meter: Measures the time spent waiting for other stages: the bubble plus exposed communication.
    """

    schedule: Schedule
    queues: Queues
    work: StageComputation
    weight_gradients: WeightGradients | None
    meter: WaitMeter
    _received: dict[tuple[str, Place], tuple[Tensor, dist.Work | None]] = field(default_factory=dict, init=False)
    _inputs: dict[Place, Tensor] = field(default_factory=dict, init=False)
    _results: dict[Place, tuple[GradientEdge | None, Tensor | None]] = field(default_factory=dict, init=False)
    _to_send: dict[tuple[str, Place], Tensor] = field(default_factory=dict, init=False)
    _sent: deque[tuple[Tensor, dist.Work]] = field(default_factory=deque, init=False)

    def run(self) -> None:
        """Perform this rank's whole program; nothing is in flight when it returns."""
        perform = {
            schedules.FORWARD: self._forward,
            schedules.BACKWARD: self._backward,
            schedules.INPUT: self._backward_input,
            schedules.WEIGHT: self._backward_weight,
            schedules.SEND_F: self._send,
            schedules.SEND_B: self._send,
            schedules.RECV_F: self._receive,
            schedules.RECV_B: self._receive,
        }
        for action in self.schedule.programs[self.queues.rank]:
            perform[action.kind](action)
        self._wait_for_sends(0)

    def _forward(self, action: Action) -> None:
        place = (action.chunk, action.micro_batch)
        x = self._take(schedules.RECV_F, place) if action.chunk else None
        if x is not None:
            self._inputs[place] = x.requires_grad_()
        y, loss = self.work.forward(*place, x)
        # The backward needs the graph of y, not its values, whose memory is free once they have been sent.
        self._results[place] = (None if y is None else get_gradient_edge(y), loss)
        if y is not None:
            self._hand_over(schedules.SEND_F, schedules.RECV_F, place, action.chunk + 1, y.detach())

    def _backward(self, action: Action) -> None:
        place = (action.chunk, action.micro_batch)
        edge, loss = self._results.pop(place)
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if edge is not None:
            roots.append(edge)
            gradients.append(self._take(schedules.RECV_B, place))
        if loss is not None:
            roots.append(get_gradient_edge(loss))
            gradients.append(torch.ones_like(loss))
        self.work.before_backward(*place)
        torch.autograd.backward(roots, gradients)
        if action.chunk:
            x = self._inputs.pop(place)
            assert x.grad is not None
            dx, x.grad = x.grad, None
            self._hand_over(schedules.SEND_B, schedules.RECV_B, place, action.chunk - 1, dx)

    def _backward_input(self, action: Action) -> None:
        assert self.weight_gradients is not None
        with self.weight_gradients.keep((action.chunk, action.micro_batch)):
            self._backward(action)

    def _backward_weight(self, action: Action) -> None:
        assert self.weight_gradients is not None
        self.weight_gradients.run((action.chunk, action.micro_batch))

    def _hand_over(self, send: str, receive: str, place: Place, to: int, x: Tensor) -> None:
        """Pass ``x`` to chunk ``to``: by a later send of the program, or directly if the chunk is on this rank."""
        if self.schedule.rank_of(to) == self.queues.rank:
            self._received[receive, (to, place[1])] = (x, None)
        else:
            self._to_send[send, place] = x.contiguous()

    def _send(self, action: Action) -> None:
        x = self._to_send.pop((action.kind, (action.chunk, action.micro_batch)))
        to = action.chunk + (1 if action.kind == schedules.SEND_F else -1)
        self._sent.append((x, self.queues.send(x, self.schedule.rank_of(to))))
        # Waiting for every send at once could not deadlock either: both ends have the same order.
        self._wait_for_sends(self.schedule.sends_kept)

    def _receive(self, action: Action) -> None:
        into = action.chunk if action.kind == schedules.RECV_F else action.chunk + 1
        source = action.chunk + (-1 if action.kind == schedules.RECV_F else 1)
        room, early = partial(self.work.empty, action.micro_batch, into), self.schedule.receives_ahead is None
        received = self.queues.receive(room, self.schedule.rank_of(source), early=early)
        self._received[action.kind, (action.chunk, action.micro_batch)] = received

    def _take(self, kind: str, place: Place) -> Tensor:
        buffer, work = self._received.pop((kind, place))
        return buffer if work is None else self.queues.finish_receive(buffer, work, self.meter)

    def _wait_for_sends(self, remaining: int) -> None:
        """Wait for the oldest sends until only ``remaining`` are in flight."""
        while len(self._sent) > remaining:
            self.meter.wait(self._sent.popleft()[1], "pp/send")


def run_forward(stages: Stages, queues: Queues, work: StageComputation) -> None:
    """Run micro-batch 0 forward through this rank's chunks, without a backward; returns after its sends complete.

    Both ends of a queue visit their chunks in forward order, so messages have the same order on both.
    """
    sent = []
    x: Tensor | None = None
    for chunk in stages.on(queues.rank):
        if not chunk.first and x is None:
            room = partial(work.empty, 0, chunk.index)
            x = queues.finish_receive(*queues.receive(room, stages.chunks[chunk.index - 1].rank))
        y, _ = work.forward(chunk.index, 0, x)
        x = y
        if y is not None and (to := stages.chunks[chunk.index + 1].rank) != queues.rank:
            y, x = y.contiguous(), None
            sent.append((y, queues.send(y, to)))
    for _, flight in sent:
        flight.wait()
