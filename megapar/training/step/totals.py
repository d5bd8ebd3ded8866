"""Loss terms and routing statistics of a step, summed over its gradient accumulation on this rank."""

from __future__ import annotations

from torch import Tensor

from megapar.model.layers.terms import Terms


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
