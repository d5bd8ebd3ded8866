"""What ``--data-path`` names, opened: text through the cache, indexed files as they are, several of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from megapar.config.record import FIELD
from megapar.data.indexed import IndexedDataset, is_indexed
from megapar.data.selected import indexed_store, split_stores
from megapar.data.source import Source, open_sources
from megapar.data.store import Split, TokenStore, open_store, open_stores
from megapar.data.tokenizer import Tokenizer
from megapar.errors import DataError
from megapar.rules.data import blend_of

if TYPE_CHECKING:
    import numpy as np


class Group(NamedTuple):
    """One corpus as it was asked for. paths: of text, or the prefix of an ``indexed`` file."""

    weight: Fraction | None
    paths: tuple[str, ...]
    indexed: bool


def groups_of(paths: Sequence[str]) -> tuple[Group, ...]:
    """The corpora that ``paths`` names; texts without weights that follow each other are one."""
    found: list[Group] = []
    for weight, path in blend_of(paths):
        indexed = is_indexed(path)
        if found and weight is None and not indexed and not found[-1].indexed:
            found[-1] = Group(None, (*found[-1].paths, path), False)
        else:
            found.append(Group(weight, (path,), indexed))
    return tuple(found)


@dataclass(frozen=True)
class Part:
    """One corpus of a blend: text (``sources``), or an indexed file (``indexed``). weight: None without weights."""

    weight: Fraction | None
    sources: tuple[Source, ...]
    indexed: IndexedDataset | None = None

    @property
    def name(self) -> str:
        """What the user called it."""
        return self.indexed.prefix if self.indexed else ", ".join(source.name for source in self.sources)


@dataclass(frozen=True)
class Side:
    """What is trained on, or held out: stores in order. weights: theirs, or None where they are one corpus together."""

    stores: tuple[TokenStore, ...]
    weights: tuple[Fraction, ...] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of the stores, each thing once."""
        return tuple(dict.fromkeys(note for store in self.stores for note in store.notes))

    def counts(self, size: int) -> np.ndarray:
        """[size]: how often each id occurs, each store as often as its weight says."""
        import numpy as np

        counts = [store.counts(size) for store in self.stores]
        if self.weights is None:
            return np.asarray(sum(counts))
        total, weight = sum(c.sum() for c in counts), float(sum(self.weights))
        shares = (total * float(w) / weight / c.sum() for c, w in zip(counts, self.weights, strict=True))
        return np.asarray(sum(c * share for c, share in zip(counts, shares, strict=True)))


def open_parts(
    paths: Sequence[str], field: str = FIELD, say: Callable[[str], object] = lambda text: None
) -> tuple[Part, ...]:
    """The corpora that ``paths`` names; texts without weights that follow each other are one. Raises DataError.

    field, say: see source.open_sources.
    """
    parts = [
        Part(group.weight, (), _opened(group.paths[0]))
        if group.indexed
        else Part(group.weight, open_sources(group.paths, field, say))
        for group in groups_of(paths)
    ]
    if not parts:
        raise DataError("no data path was given; --data-path builtin needs no file")
    return tuple(parts)


def _opened(path: str) -> IndexedDataset:
    dataset = IndexedDataset(path)
    if len(dataset.tokens) == 0:
        raise DataError(f"{dataset.data_path}: the corpus holds no tokens")
    return dataset


def open_sides(
    train: Sequence[Part],
    heldout: Sequence[Part] | None,
    split: Split,
    tokenizer: Tokenizer,
    num_ids: int,
    *,
    skip_bad: bool = False,
) -> tuple[Side, Side | None]:
    """Both sides of a corpus; the second one None where ``split`` holds nothing out.

    heldout: parts that are all held out; None holds documents of every part out by ``split``. num_ids: ids of
    indexed files must be below it. Raises DataError.
    """
    for part in (*train, *(heldout or ())):
        if part.indexed is not None:
            part.indexed.check_ids(num_ids)
    if heldout is None:
        pairs = [_split(part, split, tokenizer, skip_bad) for part in train]
        heldouts = [pair[1] for pair in pairs if pair[1] is not None]
        return _side([pair[0] for pair in pairs], train), _side(heldouts, train) if heldouts else None
    if len(train) == len(heldout) == 1 and not (train[0].indexed or heldout[0].indexed):
        pair = open_stores(train[0].sources, heldout[0].sources, split, tokenizer, skip_bad=skip_bad)
        return Side((pair.train,)), None if pair.heldout is None else Side((pair.heldout,))
    sides = [_side([_whole(part, tokenizer, skip_bad) for part in parts], parts) for parts in (train, heldout)]
    return sides[0], sides[1]


def _side(stores: Sequence[TokenStore], parts: Sequence[Part]) -> Side:
    weights = tuple(part.weight for part in parts if part.weight is not None)
    return Side(tuple(stores), weights if len(weights) > 1 else None)


def _split(part: Part, split: Split, tokenizer: Tokenizer, skip_bad: bool) -> tuple[TokenStore, TokenStore | None]:
    if part.indexed is None:
        return open_stores(part.sources, None, split, tokenizer, skip_bad=skip_bad)
    train, heldout = split_stores(part.indexed, split)
    if len(train.tokens) == 0 or (heldout is not None and len(heldout.tokens) == 0):
        aside = 0 if heldout is None else heldout.documents
        raise DataError(
            f"{part.name}: {part.indexed.documents} documents are {train.documents} to train on and {aside} held out, "
            "and both need some tokens; give --eval-data-path, another --split, or a corpus of more documents"
        )
    return train, heldout


def _whole(part: Part, tokenizer: Tokenizer, skip_bad: bool) -> TokenStore:
    if part.indexed is None:
        return open_store(part.sources, tokenizer, skip_bad=skip_bad)
    return indexed_store(part.indexed, 0, part.indexed.documents)
