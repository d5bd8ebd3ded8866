"""The shortest step: computation as it runs alone, and messages one after the other under it as soon as they can.

    forward    a segment's parameters are needed when its first unit begins; gathers start with the step
    backward   a segment's gradients are sent when its last unit has them; the step continues when all have arrived

It includes what no schedule can hide: the first gather, the last reduction, and the excess of messages over computation
in a phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """Messages of a segment.

    Attributes:
        needed: Seconds after the step's start at which its parameters are needed, if the computation runs alone.
        complete: The same for its gradients, when they are complete.
        gather: Seconds of its gather on an idle link.
        reduction: Seconds of its reduction on an idle link.
    """

    needed: float
    complete: float
    gather: float
    reduction: float


def shortest(alone: float, backward_end: float, messages: Sequence[Message]) -> float:
    """Return the seconds of the shortest step.

    Args:
        alone: Seconds of the step without communication.
        backward_end: Seconds of it up to the end of the backward.
        messages: Messages of its segments.
    """
    stalled = link = 0.0
    for message in sorted(messages, key=lambda m: m.needed):
        link += message.gather
        stalled += max(0.0, link - (message.needed + stalled))
    for message in sorted(messages, key=lambda m: m.complete):
        link = max(link, message.complete + stalled) + message.reduction
    return alone + stalled + max(0.0, link - (backward_end + stalled))
