"""Predicted time of linear layers with and without hiding their collectives under their products. Imports no torch.

A model, not a measurement: products run in waves of tiles (``DeviceKind.product_seconds``), and one message is sent at
a time (``DeviceKind.send_seconds``). The programs are those drawn in ``overlapped_linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapar.core.device.kinds import DeviceKind

OFF, ON, FUSED = "off", "on", "fused"


class CutLinear(NamedTuple):
    """A linear layer on one rank of mp.

    Attributes:
        column: Column parallel (out features cut); else row parallel (in features cut).
    """

    column: bool
    inner: int
    outer: int


@dataclass(frozen=True)
class Price:
    """Predicted seconds of the forward and backward of layers on the ranks of one node.

    Attributes:
        item: Bytes of an element in ``dtype``.
        rows: Rows of all ranks and all samples together.
        gathered: Sequence parallel: activations are gathered and scattered.
    """

    kind: DeviceKind
    dtype: str
    item: int
    ranks: int
    rows: int
    gathered: bool

    def best(self, layers: Sequence[CutLinear]) -> str:
        """Return ``on`` if it is faster than ``off``, or if the class always ``hides``, as measured on a CPU."""
        if self.kind.device_class.hides:
            return ON
        return min((OFF, ON), key=lambda form: self.seconds(layers, form))

    def seconds(self, layers: Sequence[CutLinear], form: str) -> float:
        """Return the seconds of all layers in the given form."""
        by_form = {OFF: self._off, ON: self._on, FUSED: self._fused}
        return sum(by_form[form](layer) for layer in layers)

    def _off(self, layer: CutLinear) -> float:
        """Return the seconds of three products and of every message, one at a time."""
        return sum(self._products(layer)) + sum(self._messages(layer))

    def _on(self, layer: CutLinear) -> float:
        """Return the seconds with pieces under products, on the slowest rank.

        That is a rank in the middle, which multiplies the rows before its own and those after them separately.
        """
        forward, dgrad, wgrad = self._products(layer)
        if not self.gathered:
            cut = dgrad if layer.column else forward
            whole = self._message(layer)
            left = self._leaving(self._cut(layer, whole=True), whole, wgrad if layer.column else 0.0)
            return forward + dgrad + wgrad - cut - (wgrad if layer.column else 0.0) + left
        message = self._message(layer)
        if layer.column:
            backward = max(dgrad, message) + max(wgrad, message)
            return self._arriving(self._cut(layer), message, self._share(layer)) + backward
        local = 2 * self._share(layer)
        later = sum(self._share(layer, (self.ranks - 1) / 2) for _ in range(2))
        gathers = self._arriving(self._cut(layer), message, local) + later
        return self._leaving(self._cut(layer, whole=True), message) + gathers

    def _fused(self, layer: CutLinear) -> float:
        """Return the seconds of torch's fused operators (sequence parallelism only): a product per rank's rows."""
        if not self.gathered:
            return self._off(layer)
        _, _, wgrad = self._products(layer)
        message, parts = self._message(layer), [self._share(layer)] * self.ranks
        arriving = self._arriving(parts[1:], message, parts[0])
        leaving = self._leaving(parts, message)
        return arriving + leaving + (max(wgrad, message) if layer.column else wgrad)

    def _products(self, layer: CutLinear) -> tuple[float, float, float]:
        """Return the seconds of (forward, dgrad, wgrad) for all rows."""
        rows, inner, outer = self.rows, layer.inner, layer.outer
        product = self.kind.product_seconds
        return (
            product(rows, inner, outer, self.dtype),
            product(rows, outer, inner, self.dtype),
            product(outer, rows, inner, self.dtype),
        )

    def _share(self, layer: CutLinear, ranks: float = 1.0) -> float:
        """Return the seconds of the product of the rows of ``ranks`` ranks."""
        return self.kind.product_seconds(round(self.rows * ranks / self.ranks), layer.inner, layer.outer, self.dtype)

    def _cut(self, layer: CutLinear, whole: bool = False) -> list[float]:
        """Return the seconds of each piece of the product: of the other ranks' rows, or of all rows if ``whole``."""
        device = self.kind.device_class
        sent = self.rows / self.ranks * self._width(layer) * self.item
        rows = self.rows if whole else self.rows / self.ranks
        count = max(1, min(device.pieces, int(sent // device.piece_bytes), int(rows // device.least_rows)))
        if whole:
            return [self._share(layer, self.ranks / count)] * count
        halves = (self.ranks - 1) // 2, self.ranks - 1 - (self.ranks - 1) // 2
        return [sum(self._share(layer, half / count) for half in halves if half)] * count

    def _width(self, layer: CutLinear) -> int:
        """Return the features outside the layer, which are sent."""
        return layer.inner if layer.column else layer.outer

    def _message(self, layer: CutLinear) -> float:
        """Return the seconds of one collective of the layer's rows: all-gather, reduce-scatter or all-reduce."""
        size = self.rows * self._width(layer) * self.item * (self.ranks - 1) / self.ranks
        return self.kind.send_seconds(size if self.gathered else 2 * size, self.ranks)

    def _messages(self, layer: CutLinear) -> list[float]:
        """Return the seconds of each message, forward and backward; a column layer's input is gathered twice."""
        count = 1 if not self.gathered else 3 if layer.column else 2
        return [self._message(layer)] * count

    def _arriving(self, products: Sequence[float], message: float, local: float) -> float:
        """Return the end of the last product, each of which waits for its piece and starts after ``local``."""
        now, latency = local, self.kind.device_class.latency_seconds
        for number, product in enumerate(products, 1):
            arrival = (message - latency) * number / len(products) + number * latency
            now = max(now, arrival) + product
        return now

    def _leaving(self, products: Sequence[float], message: float, later: float = 0.0) -> float:
        """Return the end of the last message, each sent after its product; ``later`` is computed in the meantime."""
        now = sent = 0.0
        latency = self.kind.device_class.latency_seconds
        piece = (message - latency) / len(products) + latency
        for product in products:
            now += product
            sent = max(sent, now) + piece
        return max(sent, now + later)
