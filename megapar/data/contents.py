"""Counts of a corpus for the log. The token stores provide them, so no data is read."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction

from megapar.data.blend import BlendSource
from megapar.data.text.source import BUILTIN
from megapar.data.tokens.store import StoreBlend

MOST_NAMES = 3  # file names of one corpus that are shown


@dataclass(frozen=True)
class Content:
    """The training or the held-out documents of one corpus.

    Attributes:
        name: Its files.
        documents: Number of documents; None if not counted.
        tokens: Number of tokens; None if not counted.
        samples: Samples of one epoch; None if not counted.
        weight: Weight in a mixture.
    """

    name: str
    documents: int | None
    tokens: int | None
    samples: int | None
    weight: Fraction | None = None

    def __str__(self) -> str:
        counted = [
            f"{count:,} {unit}"
            for count, unit in ((self.documents, "documents"), (self.tokens, "tokens"))
            if count is not None
        ]
        weight = [] if self.weight is None else [f"weight {float(self.weight):g}"]
        return f"{self.name}: {', '.join([*counted, *weight]) or 'not counted'}"


def contents_of(sources: Sequence[BlendSource], blend: StoreBlend, pieces: Sequence[Sized]) -> tuple[Content, ...]:
    """Return the counts of every store of a blend. ``sources`` and ``pieces`` are in the order of the stores."""
    rows = zip(sources, blend.stores, pieces, strict=True)
    return tuple(
        Content(_name(source), store.documents, len(store.tokens), len(piece), source.weight)
        for source, store, piece in rows
    )


def _name(source: BlendSource) -> str:
    if source.indexed is not None:
        return f"{source.name} (.bin/.idx)"
    names = [_shown(one.name) for one in source.sources]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    files = f" ({len(names)} files)" if len(names) > 1 else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}{files}"


def _shown(name: str) -> str:
    return "the built-in text, Python's documentation" if name == BUILTIN else name
