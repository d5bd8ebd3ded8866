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
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megapar.core.comm.meter import WaitMeter
from megapar.core.pipeline import schedule as kinds
from megapar.core.pipeline.queues import Queues
from megapar.core.pipeline.schedule import Action, Schedule
from megapar.core.pipeline.stages import Stages
from megapar.core.tensor_parallel.weight_gradients import WeightGradients

Place = tuple[int, int]  # chunk, micro-batch


class StageComputation(Protocol):
    """The computation of the stages; the pipeline only moves activations and gradients."""

    def empty(self, micro_batch: int, chunk: int) -> Tensor:
        """Allocate a buffer for the activations that enter ``chunk``."""

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return (activations for the next chunk, None for the last; this chunk's own loss, or None)."""

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        """Prepare for a micro-batch's gradients of a chunk; called just before its backward."""


class Runner:
    """One run through a schedule; it keeps nothing afterwards.

    Args:
        weight_gradients: Passes work from I to W; None for schedules without a split backward.
        meter: Measures the time spent waiting for other stages: the bubble plus exposed communication.
    """

    def __init__(
        self,
        schedule: Schedule,
        queues: Queues,
        work: StageComputation,
        weight_gradients: WeightGradients | None,
        meter: WaitMeter,
    ) -> None:
        self._meter = meter
        self._schedule = schedule
        self._queues = queues
        self._work = work
        self._weight_gradients = weight_gradients
        self._received: dict[tuple[str, Place], tuple[Tensor, dist.Work | None]] = {}
        self._inputs: dict[Place, Tensor] = {}
        self._results: dict[Place, tuple[GradientEdge | None, Tensor | None]] = {}
        self._to_send: dict[tuple[str, Place], Tensor] = {}
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def run(self) -> None:
        """Perform this rank's whole program; nothing is in flight when it returns."""
        perform = {
            kinds.FORWARD: self._forward,
            kinds.BACKWARD: self._backward,
            kinds.INPUT: self._backward_input,
            kinds.WEIGHT: self._backward_weight,
            kinds.SEND_F: self._send,
            kinds.SEND_B: self._send,
            kinds.RECV_F: self._receive,
            kinds.RECV_B: self._receive,
        }
        for action in self._schedule.programs[self._queues.rank]:
            perform[action.kind](action)
        self._wait_for_sends(0)

    def _forward(self, action: Action) -> None:
        place = (action.chunk, action.micro_batch)
        x = self._take(kinds.RECV_F, place) if action.chunk else None
        if x is not None:
            self._inputs[place] = x.requires_grad_()
        y, loss = self._work.forward(*place, x)
        # The backward needs the graph of y, not its values, whose memory is free once they have been sent.
        self._results[place] = (None if y is None else get_gradient_edge(y), loss)
        if y is not None:
            self._hand_over(kinds.SEND_F, kinds.RECV_F, place, action.chunk + 1, y.detach())

    def _backward(self, action: Action) -> None:
        place = (action.chunk, action.micro_batch)
        edge, loss = self._results.pop(place)
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if edge is not None:
            roots.append(edge)
            gradients.append(self._take(kinds.RECV_B, place))
        if loss is not None:
            roots.append(get_gradient_edge(loss))
            gradients.append(torch.ones_like(loss))
        self._work.before_backward(*place)
        torch.autograd.backward(roots, gradients)
        if action.chunk:
            x = self._inputs.pop(place)
            assert x.grad is not None
            dx, x.grad = x.grad, None
            self._hand_over(kinds.SEND_B, kinds.RECV_B, place, action.chunk - 1, dx)

    def _backward_input(self, action: Action) -> None:
        assert self._weight_gradients is not None
        with self._weight_gradients.keep((action.chunk, action.micro_batch)):
            self._backward(action)

    def _backward_weight(self, action: Action) -> None:
        assert self._weight_gradients is not None
        self._weight_gradients.run((action.chunk, action.micro_batch))

    def _hand_over(self, send: str, receive: str, place: Place, to: int, x: Tensor) -> None:
        """Pass ``x`` to chunk ``to``: by a later send of the program, or directly if the chunk is on this rank."""
        if self._schedule.rank_of(to) == self._queues.rank:
            self._received[receive, (to, place[1])] = (x, None)
        else:
            self._to_send[send, place] = x.contiguous()

    def _send(self, action: Action) -> None:
        x = self._to_send.pop((action.kind, (action.chunk, action.micro_batch)))
        to = action.chunk + (1 if action.kind == kinds.SEND_F else -1)
        self._sent.append((x, self._queues.send(x, self._schedule.rank_of(to))))
        # Waiting for every send at once could not deadlock either: both ends have the same order.
        self._wait_for_sends(self._schedule.sends_kept)

    def _receive(self, action: Action) -> None:
        into = action.chunk if action.kind == kinds.RECV_F else action.chunk + 1
        source = action.chunk + (-1 if action.kind == kinds.RECV_F else 1)
        received = self._queues.receive(
            lambda: self._work.empty(action.micro_batch, into), self._schedule.rank_of(source)
        )
        self._received[action.kind, (action.chunk, action.micro_batch)] = received

    def _take(self, kind: str, place: Place) -> Tensor:
        buffer, work = self._received.pop((kind, place))
        return buffer if work is None else self._queues.finish_receive(buffer, work, self._meter)

    def _wait_for_sends(self, remaining: int) -> None:
        """Wait for the oldest sends until only ``remaining`` are in flight."""
        while len(self._sent) > remaining:
            self._meter.wait(self._sent.popleft()[1], "pp/send")


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
