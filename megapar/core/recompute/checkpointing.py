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

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from megapar.core.comm.comm_bytes import CommBytes
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.recompute.choice import RecomputeChoice
from megapar.core.recompute.replay import Replay
from megapar.core.recompute.saved_inputs import SavedInputs, SavedUnit

T = TypeVar("T")


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

    choice: which of them. comm: what they launch. sent_bytes: the world's account; what is sent again is not
    counted. keeper: how units keep their inputs; None: as they are.
    measure: is told of every unit, while it wants to, what it would keep if it were not recomputed.
    around: called in the forward of every unit; returns the context in which the unit will run again.
    """

    def __init__(
        self,
        choice: RecomputeChoice,
        comm: CommContext,
        sent_bytes: CommBytes,
        keeper: SavedInputs | None = None,
        measure: Measure | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.choice = choice
        self.keeper = keeper
        self.measure = measure
        self._comm, self._sent_bytes, self._around = comm, sent_bytes, around

    def begin(self) -> Forward:
        """One forward of one micro-batch through this rank's layers."""
        return Forward(self)

    def again(self, replay: Replay, note: Callable[[int], None] | None) -> AbstractContextManager[object]:
        """Return the context in which a unit that now runs forward will run again. note: gets the bytes it keeps."""
        return _Again(self._comm, self._sent_bytes, replay, note, self._around())


class Forward:
    """The units of one forward, in the order in which they run."""

    def __init__(self, recompute: Recompute) -> None:
        self._recompute = recompute
        self._before: SavedUnit | None = None
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
    """Surrounds a recomputation, each time that there is one: counts nothing, waits for what it launched and left.

    A recomputation ends with the last tensor that the backward needs, which may be between a launch and its wait.
    """

    def __init__(
        self,
        comm: CommContext,
        sent_bytes: CommBytes,
        replay: Replay,
        note: Callable[[int], None] | None,
        around: AbstractContextManager[object],
    ) -> None:
        self._comm, self._sent_bytes, self._replay, self._note = comm, sent_bytes, replay, note
        self._around = around
        self._tracker = None if note is None else MemoryTracker()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(self._around)
            if self._tracker is not None:
                entered.enter_context(self._tracker)
            entered.callback(self._comm.wait_since, self._comm.mark())
            entered.enter_context(self._sent_bytes.uncounted())
            self._replay.start()
            entered.callback(self._replay.stop)
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
        if self._tracker is not None and self._note is not None:
            self._note(self._tracker.bytes)
