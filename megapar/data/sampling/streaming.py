"""Streaming from a ``datasets`` source: rows are tokenized when a sample needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from megapar.data.lazy_numpy import np
from megapar.data.sampling.draws import Permutation
from megapar.data.sampling.ernie import SHORTEST_SPAN, span_counts
from megapar.data.sampling.samples import PieceOrder, TokenPieces
from megapar.data.text.hf_dataset import open_dataset
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.errors import DataError
from megapar.files.data_files import checked_text

Pieces = TypeVar("Pieces", bound=TokenPieces)

ROWS = 4096  # approximate number of rows of a block
_PROBES = 256  # rows that are tokenized to estimate their length
_TASKS = 6  # blocks in the cache: one for each of ERNIE 3.0's five tasks, and one more


class StreamedRows(NamedTuple):
    """Rows first .. last - 1 of a dataset with a column ``field``; ``name`` is for messages."""

    dataset: Any
    first: int
    last: int
    tokenizer: Tokenizer
    name: str
    field: str


class _RowPieces:
    """Pieces from the rows of a dataset, tokenized block by block.

    A block is about 4,096 consecutive rows. Every block gives the same number of pieces, estimated from rows spread
    over the data, so that a piece's block follows from its number. A block with more pieces omits some, a block with
    fewer repeats some. The most recent blocks are cached. The order permutes blocks, and reads all pieces of a block
    before the next block.
    """

    def __init__(self, rows: StreamedRows) -> None:
        if rows.last <= rows.first:
            raise DataError(
                f"{rows.name}: the split leaves no rows for training or for evaluation; pass another --split"
            )
        self._rows = rows
        self._first, self._count = rows.first, rows.last - rows.first
        self.blocks = max(1, self._count // ROWS)
        self.per_block = 1

    def __len__(self) -> int:
        return self.blocks * self.per_block

    def order(self, seed: int, stream: str) -> PieceOrder:
        return _BlockOrder(self.blocks, self.per_block, seed, stream)

    def nearby(self, number: int) -> range:
        """See samples.Nearby: the pieces of the same block, whose rows are already tokenized."""
        block = number // self.per_block
        return range(block * self.per_block, (block + 1) * self.per_block)

    def _rows_of(self, block: int) -> range:
        ends = (self._first + self._count * place // self.blocks for place in (block, block + 1))
        return range(*ends)

    def _probed(self) -> list[list[int]]:
        """Return the ids of some rows spread over the data."""
        count = min(_PROBES, self._count)
        numbers = sorted({self._first + i * self._count // count for i in range(count)})
        return self._rows.tokenizer.encode_batch(self._texts(numbers))

    def _texts(self, numbers: Any) -> list[str]:
        field, name = self._rows.field, self._rows.name
        named = zip(numbers, self._rows.dataset[list(numbers)][field], strict=True)
        return [checked_text(text, {field: text}, f"{name}, row {number}", field) for number, text in named]


class RowWindows(_RowPieces):
    """Pieces for a decoder: a block's documents, joined by the end token and cut into windows of ``length`` + 1 ids.

    Neighbouring windows share one id.
    """

    def __init__(self, rows: StreamedRows, length: int) -> None:
        super().__init__(rows)
        self._end = rows.tokenizer.special.need("eos")
        self._length = length
        probed = self._probed()
        mean = sum(len(ids) + 1 for ids in probed) / len(probed)
        self.per_block = max(1, int(mean * self._count / self.blocks) // length)
        self._block = lru_cache(maxsize=2)(self._tokens)

    def __getitem__(self, number: int) -> np.ndarray:
        block, window = divmod(number, self.per_block)
        tokens = self._block(block)
        places = np.arange(window * self._length, (window + 1) * self._length + 1) % len(tokens)
        return np.asarray(tokens[places], dtype=np.int64)

    def _tokens(self, block: int) -> np.ndarray:
        texts = self._texts(self._rows_of(block))
        documents = self._rows.tokenizer.encode_batch(texts)
        return np.array([i for document in documents for i in (*document, self._end)], dtype=np.int32)


class _Spanned(NamedTuple):
    """The spans of a block.

    Attributes:
        tokens: [T] int32, the ids of the block.
        edges: [n, 2], begin and end of each span in ``tokens``.
        rows: [n], the row of each span.
    """

    tokens: np.ndarray
    edges: np.ndarray
    rows: np.ndarray


class RowSpans(_RowPieces):
    """Pieces for ERNIE: every row is cut into spans as ``ernie.Spans`` cuts the documents of a store.

    Tasks read the blocks in different orders, so the cache has a block for each task. Raises DataError if all rows are
    too short for a span.
    """

    def __init__(self, rows: StreamedRows, longest: int) -> None:
        super().__init__(rows)
        self._longest = longest
        probed = self._probed()
        spans = int(spans_of(probed, longest).sum())
        if not spans:
            raise DataError(f"{rows.name}: no row has the {SHORTEST_SPAN} tokens that a sentence pair needs")
        self.per_block = max(1, int(spans * self._count / len(probed) / self.blocks))
        self._block = lru_cache(maxsize=_TASKS)(self._cut)

    def document(self, number: int) -> int:
        """Return the row that a span is from; repeated spans have other numbers."""
        block, span = divmod(number, self.per_block)
        rows = self._block(block).rows
        return int(rows[span % len(rows)]) + span // len(rows) * (self._first + self._count)

    def __getitem__(self, number: int) -> np.ndarray:
        block, span = divmod(number, self.per_block)
        tokens, edges, _ = self._block(block)
        begin, end = edges[span % len(edges)]
        return np.asarray(tokens[begin:end], dtype=np.int64)

    def _cut(self, block: int) -> _Spanned:
        numbers = self._rows_of(block)
        ids = self._rows.tokenizer.encode_batch(self._texts(numbers))
        parts = spans_of(ids, self._longest)
        begins = np.cumsum([0, *map(len, ids)])
        edges = [
            (begin + len(row) * part // count, begin + len(row) * (part + 1) // count)
            for begin, row, count in zip(begins, ids, parts, strict=False)
            for part in range(count)
        ]
        if not edges:
            raise DataError(
                f"{self._rows.name}: none of rows {numbers[0]} to {numbers[-1]} has the {SHORTEST_SPAN} tokens that a "
                "sentence pair needs"
            )
        tokens = np.fromiter((i for row in ids for i in row), dtype=np.int32, count=int(begins[-1]))
        return _Spanned(tokens, np.array(edges), np.repeat(np.array(numbers), parts))


def spans_of(ids: Sequence[Sequence[int]], longest: int) -> np.ndarray:
    """Return [n], the number of spans of each document."""
    return span_counts(np.array([*map(len, ids)], dtype=np.int64), longest)


@dataclass(frozen=True)
class _BlockOrder:
    """A random order of blocks, and of the windows of each block."""

    blocks: int
    windows: int
    seed: int
    stream: str

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, self.blocks * self.windows)
        block, window = divmod(place, self.windows)
        block = _permutation(self.blocks, self.seed, f"{self.stream}/blocks/{epoch}")[block]
        return (
            block * self.windows + _permutation(self.windows, self.seed, f"{self.stream}/block/{epoch}/{block}")[window]
        )


@lru_cache(maxsize=8)
def _permutation(count: int, seed: int, stream: str) -> Permutation:
    return Permutation(count, seed, stream)


def split_rows(
    name: str, field: str, split: Split, tokenizer: Tokenizer, make: Callable[[StreamedRows], Pieces]
) -> TrainHeldout[Pieces]:
    """Return a dataset's pieces: the first rows are for training, the next held out. Raises DataError."""
    dataset = open_dataset(name, field=field)
    first, last = split.cuts(len(dataset))
    train = make(StreamedRows(dataset, 0, first, tokenizer, name, field))
    return TrainHeldout(
        train, make(StreamedRows(dataset, first, last, tokenizer, name, field)) if split.heldout else None
    )
