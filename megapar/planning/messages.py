"""What the layers of a model send inside their groups, by group and kind of collective."""

from __future__ import annotations

import math

from megapar.core.context_parallel.layout import RING, ULYSSES
from megapar.planning.layout import Layout
from megapar.planning.parts import Message


class Messages:
    """Of one micro-batch of a layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def message(self, axis: str, kind: str, whole: float, phase: str, *, hidden: bool = False) -> Message:
        """What one rank sends of a collective over ``whole`` bytes."""
        n = self._layout.config.grid.size(axis)
        factor = {"all_reduce": 2.0, "all_to_all": 1.0}.get(kind, 1.0) * (n - 1) / n
        return Message(axis, kind, whole * factor, phase, hidden)

    def context(self, queries: float, keys: float) -> tuple[Message, ...]:
        """Of attention whose sequences cp ranks share; queries, keys: elements of them on this rank."""
        cp, e, w = self._layout.config.grid.cp, self._layout.item, self._layout.wide
        if cp == 1:
            return ()
        algorithm = self._layout.config.parallel.context_parallel_algo
        if algorithm == ULYSSES:
            groups = keys / queries * self._layout.sizes.num_attention_heads / self._layout.config.grid.mp
            copies = cp // math.gcd(cp, round(groups))
            heads = e * (2 * queries + 2 * keys * copies)
            return tuple(self.message("cp", "all_to_all", heads, phase) for phase in ("forward", "backward"))
        both, others = 2 * keys, cp - 1
        again = self._layout.config.ampipe.ampipe_degree <= 1  # with slices keys are kept, and do not come again
        if algorithm == RING:
            sent = ((e, "forward"), *([(e, "backward")] if again else []), (w, "backward"))
            return tuple(Message("cp", "send", others * both * size, phase, True) for size, phase in sent)
        keys_again = [self.message("cp", "all_gather", cp * both * e, "backward", hidden=True)] if again else []
        return (
            self.message("cp", "all_gather", cp * both * e, "forward", hidden=True),
            *keys_again,
            self.message("cp", "reduce_scatter", cp * both * w, "backward", hidden=True),
        )

    def column(self, whole: float) -> tuple[Message, ...]:
        """Of a layer cut along its out features, ``whole``: its input [t, H]."""
        if self._layout.config.grid.mp == 1:
            return ()
        if not self._layout.cut:
            return (self.message("mp", "all_reduce", whole, "backward", hidden=True),)
        return (
            self.message("mp", "all_gather", whole, "forward", hidden=True),
            self.message("mp", "all_gather", whole, "backward", hidden=True),
            self.message("mp", "reduce_scatter", whole, "backward", hidden=True),
        )

    def row(self, whole: float) -> tuple[Message, ...]:
        """Of a layer cut along its in features, ``whole``: its output [t, H]."""
        if self._layout.config.grid.mp == 1:
            return ()
        if not self._layout.cut:
            return (self.message("mp", "all_reduce", whole, "forward", hidden=True),)
        return (
            self.message("mp", "reduce_scatter", whole, "forward", hidden=True),
            self.message("mp", "all_gather", whole, "backward", hidden=True),
        )

    def leave(self) -> tuple[Message, ...]:
        """Of the word embedding's output."""
        whole = self._layout.item * self._layout.tokens * self._layout.sizes.hidden_size
        if self._layout.config.grid.mp == 1:
            return ()
        if not self._layout.cut:
            return (self.message("mp", "all_reduce", whole, "forward"),)
        return (
            self.message("mp", "reduce_scatter", whole, "forward"),
            self.message("mp", "all_gather", whole, "backward"),
        )

    def copied(self, whole: float, phase: str) -> list[Message]:
        """An input that all mp ranks hold alike: its gradient is summed."""
        return [self.message("mp", "all_reduce", whole, phase)] if self._layout.config.grid.mp > 1 else []
