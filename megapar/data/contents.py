"""What a corpus holds, for people: counts that its stores know already, nothing is read for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from megapar.data.blend import Part, Side
from megapar.data.source import BUILTIN

MOST_NAMES = 3  # of one corpus' files


class _Sized(Protocol):
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Content:
    """One corpus of one side. name: its files. documents, tokens: None where nobody has counted them.

    samples: of one epoch, where samples are pieces of this corpus. weight: of a mixture.
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


def contents_of(parts: Sequence[Part], side: Side, pieces: Sequence[_Sized]) -> tuple[Content, ...]:
    """Of every corpus of a side: its part, and what its samples are made from, in the order of ``side.stores``."""
    rows = zip(parts, side.stores, pieces, strict=True)
    return tuple(
        Content(_name(part), store.documents, len(store.tokens), len(piece), part.weight) for part, store, piece in rows
    )


def _name(part: Part) -> str:
    if part.indexed is not None:
        return f"{part.name} (.bin/.idx)"
    names = [_told(source.name) for source in part.sources]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    files = f" ({len(names)} files)" if len(names) > 1 else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}{files}"


def _told(name: str) -> str:
    return "the built-in text, Python's documentation" if name == BUILTIN else name
