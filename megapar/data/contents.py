"""The counts of a corpus that the log shows: its stores know them, nothing is read for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from megapar.data.blend import BlendSource
from megapar.data.text.source import BUILTIN
from megapar.data.tokens.store import StoreBlend

MOST_NAMES = 3  # of one corpus' files


class _Sized(Protocol):
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Content:
    """The training or the held-out documents of one corpus. name: its files. documents, tokens: None if not counted.

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


def contents_of(sources: Sequence[BlendSource], blend: StoreBlend, pieces: Sequence[_Sized]) -> tuple[Content, ...]:
    """The counts of every store of a blend. sources, pieces: of the stores, in their order."""
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
