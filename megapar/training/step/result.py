"""The result of an optimizer step, which the stepper returns and the monitor turns into a record."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapar.core.comm.meter import Waits
from megapar.training.step.denominators import Denominators
from megapar.training.step.totals import Totals


@dataclass
class StepResult:
    """The result of one optimizer step. Tensors are this rank's sums, on the device.

    Attributes:
        iteration: Number of the step, from 1.
        consumed_samples: Samples read so far.
        consumed_tokens: Tokens read so far, without padding.
        lr: Learning rate.
        denominators: Denominators of the terms, over the global batch.
        totals: Sums of the loss terms and routing statistics.
        norm: Global gradient norm.
        loss_scale: Loss scale of the gradients.
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
    denominators: Denominators
    totals: Totals
    norm: Tensor
    loss_scale: float
    skipped: bool
    sent_bytes: dict[str, int]
    seconds: float
    exposed: Waits | None
    waited: Waits
    ended: float
