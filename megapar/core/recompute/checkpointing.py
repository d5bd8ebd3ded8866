"""Activation checkpointing: a unit of consecutive layers keeps only its inputs and runs again in the backward.

    forward    x0 [unit 0] x1 [unit 1] x2 ..            kept: x0, x1, ..; activations inside a unit are dropped
    backward   .. [unit 1 again][its backward] [unit 0 again][its backward]

Uses torch's non-reentrant checkpoint: the layers' autograd graph is built in the forward, and its saved tensors are
filled in again when the backward needs them, up to the last one needed. Collectives inside a unit are launched again,
in the same order on all ranks. Random numbers are functions of their place (``core.random``), so dropout masks repeat
without stored state; a unit takes its inputs, including the micro-batch's random streams, as arguments.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from megapar.core.comm.accounts import CommBytes
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.recompute.adaptive import Adaptive
from megapar.core.recompute.choice import RecomputeChoice
from megapar.core.recompute.replay import Replay
from megapar.core.recompute.saved_inputs import SavedInputs, SavedUnit

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Recompute:
    """Activation checkpointing of this rank's layers.

    Attributes:
        sent_bytes: The world's byte counts; bytes sent by a recomputation are not counted.
        saved_inputs: Shards or offloads the inputs that units keep; None: keep them unchanged.
        around: Called in the forward of every unit; returns the context in which the unit will run again.
    """

    choice: RecomputeChoice
    comm: CommContext
    sent_bytes: CommBytes
    saved_inputs: SavedInputs | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def begin(self) -> Forward:
        """Begin one forward of one micro-batch through this rank's layers."""
        return Forward(self)

    def recomputation(self, replay: Replay, note: Callable[[int], None] | None) -> AbstractContextManager[object]:
        """Return the context for the recomputation of a unit. note: receives the bytes that the unit keeps."""
        return _Recomputation(self.comm, self.sent_bytes, replay, note, self.around())


class Forward:
    """The units of one forward, in the order in which they run."""

    def __init__(self, recompute: Recompute) -> None:
        self._recompute = recompute
        self._before: SavedUnit | None = None
        self._number = 0

    def run(self, unit: Callable[..., T], *inputs: Any, replay: Replay | None = None) -> T:
        """Run ``unit(*inputs)`` so that it is recomputed in the backward.

        The unit keeps the tensors among its inputs: any number, any shape, with or without gradient. Other inputs are
        passed through, and tensors inside them are neither sharded nor offloaded. replay: passed here if the unit
        itself must distinguish its forward from its recomputation.
        """
        if not torch.is_grad_enabled():
            return unit(*inputs)
        note, replay = self._note(), replay or Replay()
        with self._keeping(replay):
            return checkpoint(
                unit,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=lambda: (nullcontext(), self._recompute.recomputation(replay, note)),
                early_stop=note is None,  # an early stop would falsify the measured bytes
            )

    def _note(self) -> Callable[[int], None] | None:
        """Return the callback that receives the bytes of the next unit, or None if nothing is measured."""
        choice, number = self._recompute.choice, self._number
        self._number += 1
        if not isinstance(choice, Adaptive) or not choice.measuring:
            return None
        return partial(choice.note, number)

    def _keeping(self, replay: Replay) -> AbstractContextManager[object]:
        """Return the context in which a unit's inputs are saved; the checkpoint handles its other tensors."""
        if self._recompute.saved_inputs is None:
            return nullcontext()
        self._before = self._recompute.saved_inputs.enter(self._before)
        replay.keep_by(self._before.keep, self._before.whole)
        return self._before.hooks()


@dataclass(eq=False)
class _Recomputation:
    """The context of a recomputation, reusable: counts no bytes, and waits for unfinished collectives at the end.

    A recomputation ends with the last tensor that the backward needs, which may be between a launch and its wait.
    """

    comm: CommContext
    sent_bytes: CommBytes
    replay: Replay
    note: Callable[[int], None] | None
    around: AbstractContextManager[object]

    def __post_init__(self) -> None:
        self._tracker = None if self.note is None else MemoryTracker()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(self.around)
            if self._tracker is not None:
                entered.enter_context(self._tracker)
            entered.callback(self.comm.wait_since, self.comm.mark())
            entered.enter_context(self.sent_bytes.uncounted())
            self.replay.start()
            entered.callback(self.replay.stop)
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
        if self._tracker is not None and self.note is not None:
            self.note(self._tracker.bytes)
