"""The corpora that ``--data-path`` names: text is opened through the token cache, indexed files directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megapar.data.text.source import WHOLE_FILE, FileSource, TextSource, open_sources
from megapar.data.tokens.indexed import IndexedDataset, is_indexed
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.store import StoreBlend, TokenStore, indexed_store, split_stores
from megapar.data.tokens.token_cache import EncodedText, TokenCache
from megapar.errors import DataError
from megapar.files.data_files import FIELD, PARAGRAPH, blend_of


class Group(NamedTuple):
    """One corpus before it is opened.

    Attributes:
        weight: Weight in the blend; None if no weights are given.
        paths: Paths of text, or the prefix of one indexed file.
        indexed: True if ``paths`` is the prefix of an indexed file.
        name: Name of the path; "" without names.
    """

    weight: Fraction | None
    paths: tuple[str, ...]
    indexed: bool
    name: str = ""


def groups_of(paths: Sequence[str]) -> tuple[Group, ...]:
    """Return the corpora that ``paths`` names; consecutive texts without weights are one corpus."""
    corpora: list[Group] = []
    for weight, path, name in blend_of(paths):
        indexed = is_indexed(path)
        if corpora and weight is None and not (name or indexed or corpora[-1].indexed):
            corpora[-1] = Group(None, (*corpora[-1].paths, path), False)
        else:
            corpora.append(Group(weight, (path,), indexed, name))
    return tuple(corpora)


@dataclass(frozen=True)
class BlendSource:
    """One corpus of a blend: sources of text, or a file of tokens.

    Attributes:
        weight: None if no weights are given.
        label: The name in front of its path; "" without names.
    """

    weight: Fraction | None
    sources: tuple[TextSource, ...]
    indexed: IndexedDataset | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The corpus as ``--data-path`` names it."""
        return self.indexed.prefix if self.indexed else ", ".join(source.name for source in self.sources)

    def count(self, reader: str) -> int:
        """Return the number of its files that one of ``FileSource``'s readers reads."""
        return sum(isinstance(source, FileSource) and source.read_as == reader for source in self.sources)


def open_blend(
    paths: Sequence[str], field: str = FIELD, report: Callable[[str], object] = lambda text: None, per: str = PARAGRAPH
) -> tuple[BlendSource, ...]:
    """Open the corpora that ``paths`` names; consecutive texts without weights are one corpus.

    ``field``, ``report`` and ``per`` are those of ``source.open_sources``. Raises DataError if a path cannot be read.
    """
    corpora = [
        BlendSource(group.weight, (), _opened(group.paths[0]), group.name)
        if group.indexed
        else BlendSource(group.weight, open_sources(group.paths, field, report, per=per), label=group.name)
        for group in groups_of(paths)
    ]
    if not corpora:
        raise DataError("no data path was given; --data-path builtin needs no file")
    return tuple(corpora)


def _opened(path: str) -> IndexedDataset:
    dataset = IndexedDataset(path)
    if len(dataset.tokens) == 0:
        raise DataError(f"{dataset.data_path}: the corpus contains no tokens")
    return dataset


def open_stores(
    data: TrainHeldout[tuple[BlendSource, ...]], split: Split, cache: TokenCache, num_ids: int, evaluates: bool = True
) -> TrainHeldout[StoreBlend]:
    """Open the token stores of a corpus.

    Raises DataError if a corpus is broken, or if the split leaves one of its two sides empty.

    Args:
        data: The sources; without held-out ones, ``split`` holds documents of every source out.
        num_ids: All ids of indexed files must be below it.
        evaluates: Held-out documents are needed; otherwise there are none if a source has too few.
    """
    for source in (*data.train, *(data.heldout or ())):
        if source.indexed is not None:
            source.indexed.check_ids(num_ids)
    if data.heldout is not None:
        return data.map(lambda sources: _blended([_whole(source, cache) for source in sources], sources))
    pairs = [_split(source, split, cache, evaluates) for source in data.train]
    heldout = [pair.heldout for pair in pairs if pair.heldout is not None]
    train = _blended([pair.train for pair in pairs], data.train)
    return TrainHeldout(train, _blended(heldout, data.train) if len(heldout) == len(pairs) else None)


def _blended(stores: Sequence[TokenStore], sources: Sequence[BlendSource]) -> StoreBlend:
    weights = tuple(source.weight for source in sources if source.weight is not None)
    return StoreBlend(tuple(stores), weights if len(weights) > 1 else None)


def _tokens(source: BlendSource, cache: TokenCache) -> EncodedText:
    return cache.open(source.sources) if source.indexed is None else EncodedText(source.indexed, ())


def _split(source: BlendSource, split: Split, cache: TokenCache, evaluates: bool) -> TrainHeldout[TokenStore]:
    tokens, notes = _tokens(source, cache)
    stores = split_stores(tokens, split, notes)
    empty = stores.heldout is not None and len(stores.heldout.tokens) == 0
    if len(stores.train.tokens) == 0 or (empty and evaluates):
        heldout = 0 if stores.heldout is None else stores.heldout.documents
        per = " (--document-per paragraph cuts files at blank lines)" if source.count(WHOLE_FILE) else ""
        raise DataError(
            f"{source.name}: of {tokens.documents} documents {stores.train.documents} are for training and {heldout} "
            f"held out, and both need at least one; pass more documents{per}, --eval-data-path, another --split, or "
            "--split 100,0 with --eval-interval 0"
        )
    return TrainHeldout(stores.train, None) if empty else stores


def _whole(source: BlendSource, cache: TokenCache) -> TokenStore:
    tokens, notes = _tokens(source, cache)
    return indexed_store(tokens, 0, tokens.documents, notes)
