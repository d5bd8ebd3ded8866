"""What it costs to hide the collectives of linear layers under their products, priced before it is chosen; no torch.

A model, not measured: products run in waves of tiles (``DeviceKind.product_seconds``), and one message is on its way
at a time (``DeviceKind.send_seconds``). The programs priced are those drawn in ``overlapped_linear``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapar.core.device.kinds import DeviceKind

OFF, ON, FUSED = "off", "on", "fused"


class CutLinear(NamedTuple):
    """A linear layer on one rank of mp. column: its out features are cut, otherwise those that go in."""

    column: bool
    inner: int
    outer: int


@dataclass(frozen=True)
class Price:
    """Prices a layer's forward and backward, in seconds, on ``ranks`` of one node.

    rows: of all ranks, all samples together. item: bytes of an element in ``dtype``. gathered: sequence parallel.
    """

    kind: DeviceKind
    dtype: str
    item: int
    ranks: int
    rows: int
    gathered: bool

    def best(self, layers: Sequence[CutLinear]) -> str:
        """``on`` where it takes less time than ``off``; a CPU's class hides by measurement."""
        if self.kind.of.hides:
            return ON
        return min((OFF, ON), key=lambda form: self.seconds(layers, form))

    def seconds(self, layers: Sequence[CutLinear], form: str) -> float:
        """Of all of them."""
        by_form = {OFF: self._off, ON: self._on, FUSED: self._fused}
        return sum(by_form[form](layer) for layer in layers)

    def _off(self, layer: CutLinear) -> float:
        """Three products, and every message by itself."""
        return sum(self._products(layer)) + sum(self._messages(layer))

    def _on(self, layer: CutLinear) -> float:
        """Pieces under products. The slowest rank stands in the middle: it has others before and behind its rows."""
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
        own = 2 * self._share(layer)
        behind = sum(self._share(layer, (self.ranks - 1) / 2) for _ in range(2))
        gathers = self._arriving(self._cut(layer), message, own) + behind
        return self._leaving(self._cut(layer, whole=True), message) + gathers

    def _fused(self, layer: CutLinear) -> float:
        """A product for each rank's rows; without sequence parallelism torch has no such operator."""
        if not self.gathered:
            return self._off(layer)
        _, _, wgrad = self._products(layer)
        message, parts = self._message(layer), [self._share(layer)] * self.ranks
        arriving = self._arriving(parts[1:], message, parts[0])
        leaving = self._leaving(parts, message)
        return arriving + leaving + (max(wgrad, message) if layer.column else wgrad)

    def _products(self, layer: CutLinear) -> tuple[float, float, float]:
        """(forward, dgrad, wgrad) of all rows."""
        rows, inner, outer = self.rows, layer.inner, layer.outer
        product = self.kind.product_seconds
        return (
            product(rows, inner, outer, self.dtype),
            product(rows, outer, inner, self.dtype),
            product(outer, rows, inner, self.dtype),
        )

    def _share(self, layer: CutLinear, ranks: float = 1.0) -> float:
        """The product of the rows of so many ranks."""
        return self.kind.product_seconds(round(self.rows * ranks / self.ranks), layer.inner, layer.outer, self.dtype)

    def _cut(self, layer: CutLinear, whole: bool = False) -> list[float]:
        """The product, piece by piece: of the others' rows, or of all of them."""
        of = self.kind.of
        sent = self.rows / self.ranks * self._width(layer) * self.item
        least = self.rows if whole else self.rows / self.ranks
        count = max(1, min(of.pieces, int(sent // of.piece_bytes), int(least // of.least_rows)))
        if whole:
            return [self._share(layer, self.ranks / count)] * count
        halves = (self.ranks - 1) // 2, self.ranks - 1 - (self.ranks - 1) // 2
        return [sum(self._share(layer, half / count) for half in halves if half)] * count

    def _width(self, layer: CutLinear) -> int:
        """Features outside the layer, which travel."""
        return layer.inner if layer.column else layer.outer

    def _message(self, layer: CutLinear) -> float:
        """One collective of the layer's rows: a gather or a reduce-scatter, or both as one all-reduce."""
        size = self.rows * self._width(layer) * self.item * (self.ranks - 1) / self.ranks
        return self.kind.send_seconds(size if self.gathered else 2 * size)

    def _messages(self, layer: CutLinear) -> list[float]:
        """Of forward and backward; a column's input is gathered again."""
        often = 1 if not self.gathered else 3 if layer.column else 2
        return [self._message(layer)] * often

    def _arriving(self, products: Sequence[float], message: float, own: float) -> float:
        """Until the last product, where each waits for its piece and runs behind ``own``."""
        now, latency = own, self.kind.of.latency_seconds
        for number, product in enumerate(products, 1):
            there = (message - latency) * number / len(products) + number * latency
            now = max(now, there) + product
        return now

    def _leaving(self, products: Sequence[float], message: float, behind: float = 0.0) -> float:
        """Until the last piece has arrived, where each leaves behind its product; ``behind``: computed meanwhile."""
        now = sent = 0.0
        piece = (message - self.kind.of.latency_seconds) / len(products) + self.kind.of.latency_seconds
        for product in products:
            now += product
            sent = max(sent, now) + piece
        return max(sent, now + behind)
