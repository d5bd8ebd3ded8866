"""Recompute: a unit of consecutive layers keeps only its inputs and is computed again when its gradient arrives.

    forward    x0 [unit 0] x1 [unit 1] x2 ..            kept: x0, x1, ..; what lies inside a unit is dropped
    backward   .. [unit 1 again][its backward] [unit 0 again][its backward]

By torch's non-reentrant checkpoint: the layers' own autograd graph is built in the forward, and what it saved is filled
in again when the backward asks for it, up to the last tensor that it needs. Collectives inside a unit are launched
again, in the same order on all ranks. Random numbers are functions of their place (``core.random``), so masks repeat
without any state being kept; a unit takes its inputs, among them the micro-batch's streams, as arguments.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

from torch.utils.checkpoint import checkpoint

from megapar.core.axis import Ledger
from megapar.core.tickets import Traffic

T = TypeVar("T")


class Span(NamedTuple):
    """Consecutive layers [start, stop) of this rank that run together; recomputed: as one unit."""

    start: int
    stop: int
    recomputed: bool


class Choice(Protocol):
    """Which layers are recomputed, and in which units."""

    def spans(self, num_layers: int) -> Sequence[Span]:
        """All of this rank's layers, counted from 0, in order."""
        ...


class Interval(NamedTuple):
    """Every ``layers`` consecutive layers are a unit; the last one may be shorter."""

    layers: int

    def spans(self, num_layers: int) -> list[Span]:
        """See ``Choice``."""
        starts = range(0, num_layers, self.layers)
        return [Span(start, min(start + self.layers, num_layers), True) for start in starts]


class Block(NamedTuple):
    """The first ``layers`` layers are a unit each, the others keep everything."""

    layers: int

    def spans(self, num_layers: int) -> list[Span]:
        """See ``Choice``."""
        return [Span(number, number + 1, number < self.layers) for number in range(num_layers)]


class Recompute:
    """How the layers of this rank are recomputed.

    choice: which of them. traffic: what they launch. ledger: where the world's axes count what they send; what is sent
    again is not counted.
    """

    def __init__(self, choice: Choice, traffic: Traffic, ledger: Ledger) -> None:
        self.choice = choice
        self._traffic, self._ledger = traffic, ledger

    def begin(self) -> Forward:
        """One forward of one micro-batch through this rank's layers."""
        return Forward(self)

    def again(self) -> AbstractContextManager[object]:
        """What surrounds a unit that is computed again."""
        return _Again(self._traffic, self._ledger)


class Forward:
    """The units of one forward, in the order in which they run."""

    def __init__(self, recompute: Recompute) -> None:
        self._recompute = recompute

    def run(self, unit: Callable[..., T], *inputs: Any) -> T:
        """``unit(*inputs)``, to be computed again in the backward.

        Tensors among the inputs are what the unit keeps: any number, any shape, with or without gradient. Other
        inputs are passed as they are, and tensors inside them stay where they are.
        """
        return checkpoint(  # type: ignore[no-any-return]
            unit,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._recompute.again()),
        )


class _Again:
    """Surrounds a recomputation: counts nothing, and waits for what it launched and left.

    A recomputation ends with the last tensor that the backward needs, which may lie between a launch and its wait.
    """

    def __init__(self, traffic: Traffic, ledger: Ledger) -> None:
        self._traffic, self._ledger = traffic, ledger

    def __enter__(self) -> None:
        self._before = self._traffic.mark()
        self._was_closed, self._ledger.closed = self._ledger.closed, True

    def __exit__(self, *_: object) -> None:
        self._ledger.closed = self._was_closed
        self._traffic.land_since(self._before)
