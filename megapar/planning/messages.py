"""What the layers of a model send inside their groups, by group and kind of collective."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megapar.core.context_parallel.layout import RING, ULYSSES
from megapar.planning.layout import Layout
from megapar.planning.parts import Message

# A sequence that is cut over ranks, whole on each of them for a product and for the product of its gradient.
_GATHERED = (("all_gather", "forward"), ("all_gather", "backward"))


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
        return self._inside(whole, "backward", (*_GATHERED, ("reduce_scatter", "backward")), hidden=True)

    def row(self, whole: float, *, hidden: bool = True) -> tuple[Message, ...]:
        """Of a layer cut along its in features, ``whole``: its output [t, H]."""
        return self._inside(whole, "forward", (("reduce_scatter", "forward"), _GATHERED[1]), hidden=hidden)

    def leave(self) -> tuple[Message, ...]:
        """Of the word embedding's output, whose rows are cut; no product hides it."""
        return self.row(self._layout.item * self._layout.tokens * self._layout.sizes.hidden_size, hidden=False)

    def copied(self, whole: float, phase: str) -> tuple[Message, ...]:
        """An input that all mp ranks hold alike: its gradient is summed."""
        return (self.message("mp", "all_reduce", whole, phase),) if self._layout.config.grid.mp > 1 else ()

    def _inside(
        self, whole: float, summed: str, cut: Sequence[tuple[str, str]], *, hidden: bool
    ) -> tuple[Message, ...]:
        """Over mp: a sum in the phase ``summed`` where every rank has all positions; where they are cut, what stands
        in ``cut``, (kind, phase) each."""
        if self._layout.config.grid.mp == 1:
            return ()
        kinds = cut if self._layout.cut else (("all_reduce", summed),)
        return tuple(self.message("mp", kind, whole, phase, hidden=hidden) for kind, phase in kinds)
