"""The result of an optimizer step, which the stepper returns and the monitor turns into a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megapar.core.comm.accounts import Waits
from megapar.core.optimizer.update_rule import StepRates
from megapar.model.layers.loss import Terms
from megapar.training.step.batches import Denominators


class Totals:
    """Sums over this rank's micro-batches of a step, on the device. Unset until the first ``add``.

    Attributes:
        sums: Loss term -> its sum over the labels.
        routing: The router's losses, in the order of ``ROUTING``.
        load: Tokens per expert.
        dropped: Tokens that exceeded the capacity.
    """

    sums: dict[str, Tensor]
    routing: Tensor
    load: Tensor
    dropped: Tensor

    def __init__(self) -> None:
        self._empty = True

    def add(self, terms: Terms) -> None:
        """Add the terms of one micro-batch."""
        sums = {name: value.detach() for name, value in terms.sums.items()}
        if self._empty:
            self.sums, self.routing, self.load, self.dropped = sums, terms.routing(), terms.load, terms.dropped
            self._empty = False
            return
        self.sums = {name: value + sums[name] for name, value in self.sums.items()}
        self.routing = self.routing + terms.routing()
        self.load = self.load + terms.load
        self.dropped = self.dropped + terms.dropped


class UpdateFacts(NamedTuple):
    """Numbers of an update, on the device; None if they were not measured.

    Attributes:
        norms: As ``UpdateNorms.take`` returns them, on every rank.
        scores: As ``QkClip.clip`` returns them, of this rank's heads.
    """

    norms: Tensor | None = None
    scores: Tensor | None = None


@dataclass
class StepResult:
    """The result of one optimizer step. Tensors are this rank's sums, on the device.

    Attributes:
        iteration: Number of the step, from 1.
        consumed_samples: Samples read so far.
        consumed_tokens: Tokens read so far, without padding.
        rates: Its rates besides the learning rate.
        denominators: Denominators of the terms, over the global batch.
        update: Numbers of the update.
        skipped: True if the step did not change the model.
        sent_bytes: "axis/collective" -> bytes that this rank sent.
        seconds: Duration on the host.
        exposed: Waits of this rank for communication. None if those of the step were not timed.
        waited: Other waits for slower ranks.
        ended: End of the step, in seconds since the epoch.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    lr: float
    rates: StepRates
    denominators: Denominators
    totals: Totals
    norm: Tensor
    loss_scale: float
    update: UpdateFacts
    skipped: bool
    sent_bytes: dict[str, int]
    seconds: float
    exposed: Waits | None
    waited: Waits
    ended: float
