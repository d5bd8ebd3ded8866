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

import torch
from torch.utils.checkpoint import checkpoint

from megapar.core.axis import Ledger
from megapar.core.kept import Keeper, KeptUnit
from megapar.core.memory import MemoryTracker
from megapar.core.replay import Replay
from megapar.core.traffic import Traffic

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


class Measure(Protocol):
    """Wants to know what units keep."""

    @property
    def measuring(self) -> bool:
        """Now."""
        ...

    def note(self, layer: int, kept_bytes: int) -> None:
        """Unit ``layer`` of a forward holds so much when it has run again and keeps what its backward needs."""
        ...


class Recompute:
    """How the layers of this rank are recomputed.

    choice: which of them. traffic: what they launch. ledger: where the world's axes count what they send; what is sent
    again is not counted. keeper: how units keep their inputs; None: as they are.
    measure: is told of every unit, while it wants to, what it would keep if it were not recomputed.
    around: called in the forward of every unit; returns the context in which the unit will run again.
    """

    def __init__(
        self,
        choice: Choice,
        traffic: Traffic,
        ledger: Ledger,
        keeper: Keeper | None = None,
        measure: Measure | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.choice = choice
        self.keeper = keeper
        self.measure = measure
        self._traffic, self._ledger, self._around = traffic, ledger, around

    def begin(self) -> Forward:
        """One forward of one micro-batch through this rank's layers."""
        return Forward(self)

    def again(self, replay: Replay, note: Callable[[int], None] | None) -> AbstractContextManager[object]:
        """The context in which a unit that now runs forward will run again. note: gets how many bytes it then keeps."""
        return _Again(self._traffic, self._ledger, replay, note, self._around())


class Forward:
    """The units of one forward, in the order in which they run."""

    def __init__(self, recompute: Recompute) -> None:
        self._recompute = recompute
        self._before: KeptUnit | None = None
        self._number = 0

    def run(self, unit: Callable[..., T], *inputs: Any, replay: Replay | None = None) -> T:
        """``unit(*inputs)``, to be computed again in the backward.

        Tensors among the inputs are what the unit keeps: any number, any shape, with or without gradient. Other
        inputs are passed as they are, and tensors inside them stay where they are. replay: what the unit itself asks
        in which of its runs it is.
        """
        if not torch.is_grad_enabled():
            return unit(*inputs)
        note, replay = self._note(), replay or Replay()
        with self._keeping(replay):
            return checkpoint(  # type: ignore[no-any-return]
                unit,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), self._recompute.again(replay, note)),
                early_stop=note is None,  # what stops early leaves more behind than it keeps
            )

    def _note(self) -> Callable[[int], None] | None:
        """Whom the next unit's recomputation tells what it keeps."""
        measure, number = self._recompute.measure, self._number
        self._number += 1
        return None if measure is None or not measure.measuring else lambda kept: measure.note(number, kept)

    def _keeping(self, replay: Replay) -> AbstractContextManager[object]:
        """Surrounds what saves the inputs; what the unit itself saves is the checkpoint's."""
        if self._recompute.keeper is None:
            return nullcontext()
        self._before = self._recompute.keeper.enter(self._before)
        replay.keep_by(self._before.keep, self._before.whole)
        return self._before.hooks()


class _Again:
    """Surrounds a recomputation: counts nothing, and waits for what it launched and left.

    A recomputation ends with the last tensor that the backward needs, which may lie between a launch and its wait.
    """

    def __init__(
        self,
        traffic: Traffic,
        ledger: Ledger,
        replay: Replay,
        note: Callable[[int], None] | None,
        around: AbstractContextManager[object],
    ) -> None:
        self._traffic, self._ledger, self._replay, self._note = traffic, ledger, replay, note
        self._around = around
        self._tracker = None if note is None else MemoryTracker()

    def __enter__(self) -> None:
        self._around.__enter__()
        if self._tracker is not None:
            self._tracker.__enter__()
        self._before = self._traffic.mark()
        self._was_closed, self._ledger.closed = self._ledger.closed, True
        self._replay.start()

    def __exit__(self, *error: Any) -> None:
        self._replay.stop()
        self._ledger.closed = self._was_closed
        self._traffic.land_since(self._before)
        if self._tracker is not None and self._note is not None:
            self._tracker.__exit__(*error)
            self._note(self._tracker.bytes)
        self._around.__exit__(*error)
