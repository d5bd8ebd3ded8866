"""Training straight from a ``datasets`` source: rows are tokenised when a sample needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megapar.config.record import FIELD, checked_text
from megapar.data.sampling.ernie import SHORTEST_SPAN, span_counts
from megapar.data.sampling.permutation import Permutation
from megapar.data.sampling.samples import PieceOrder, TokenPieces
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

ROWS = 4096  # of a block, about
_PROBES = 256  # rows that are tokenised to learn how long they are
_TASKS = 6  # blocks that are kept: one for each of ERNIE 3.0's tasks, and the next


def open_dataset(name: str, part: str = "train", field: str = FIELD) -> Any:
    """The rows of a dataset on this machine: a folder of ``save_to_disk``, a folder or file ``datasets`` can read,
    or a name whose data is in its cache already. Code of a dataset is never run, and nothing is downloaded.

    Raises DataError.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name}: reading it needs the package datasets (pip install datasets)") from error
    try:
        with _offline(datasets):
            found = _found(datasets, name)
        if isinstance(found, dict):
            if part not in found:
                raise DataError(f"{name}: the dataset has no part {part!r} but {', '.join(map(repr, found))}")
            found = found[part]
    except DataError:
        raise
    except Exception as error:  # datasets raises many kinds for what it cannot read
        raise DataError(f"{name}: datasets cannot read it here ({type(error).__name__}: {error})") from error
    if field not in found.column_names:
        columns = ", ".join(map(repr, found.column_names))
        raise DataError(f"{name}: no column {field!r}; the dataset has {columns}")
    if len(found) == 0:
        raise DataError(f"{name}: the dataset holds no rows")
    return found


def _found(datasets: Any, name: str) -> Any:
    path = Path(name)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(name)
    if path.is_file():
        kind = {".jsonl": "json", ".ndjson": "json", ".txt": "text"}.get(path.suffix, path.suffix[1:])
        return datasets.load_dataset(kind, data_files=name)
    return datasets.load_dataset(name, download_config=datasets.DownloadConfig(local_files_only=True))


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Keeps the libraries off the network, where they would retry for long before they report a missing name."""
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (constants, datasets.config)
    kept = [(module, module.HF_HUB_OFFLINE) for module in modules]
    try:
        for module, _ in kept:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in kept:
            module.HF_HUB_OFFLINE = value


class _RowPieces:
    """Pieces from the rows of a dataset, tokenised block by block.

    Some 4,096 neighbouring rows are a block. Every block gives the same number of pieces, learned from rows spread over
    the data, so that a piece's block follows from its number. A block that has more leaves some out, one that has less
    begins again. The last blocks that were read are kept. Pieces of one block follow each other in the order, blocks
    are permuted.
    """

    def __init__(self, rows: Any, first: int, last: int, tokenizer: Tokenizer, name: str, field: str) -> None:
        """rows: a dataset with a column ``field``; rows first .. last - 1 are used. name: for messages."""
        if last <= first:
            raise DataError(f"{name}: no rows are left for one of the two sides; give another --split")
        self._rows = rows
        self._first, self._count = first, last - first
        self._tokenizer = tokenizer
        self._name = name
        self._field = field
        self.blocks = max(1, self._count // ROWS)
        self.per_block = 1

    def __len__(self) -> int:
        return self.blocks * self.per_block

    def order(self, seed: int | None, stream: str) -> PieceOrder:
        """See samples.Ordered."""
        return _BlockOrder(self.blocks, self.per_block, seed, stream)

    def beside(self, number: int) -> range:
        """See samples.Beside: the pieces of its block, whose rows are tokenised already."""
        block = number // self.per_block
        return range(block * self.per_block, (block + 1) * self.per_block)

    def _rows_of(self, block: int) -> range:
        ends = (self._first + self._count * place // self.blocks for place in (block, block + 1))
        return range(*ends)

    def _probed(self) -> list[list[int]]:
        """The ids of some rows spread over the data."""
        count = min(_PROBES, self._count)
        numbers = sorted({self._first + i * self._count // count for i in range(count)})
        return self._tokenizer.encode_batch(self._texts(numbers))

    def _texts(self, numbers: Any) -> list[str]:
        field, texts = self._field, self._rows[list(numbers)][self._field]
        named = zip(numbers, texts, strict=True)
        return [checked_text(text, {field: text}, f"{self._name}, row {number}", field) for number, text in named]


class RowWindows(_RowPieces):
    """A decoder's pieces: the documents of a block, joined by the end token, cut in windows of ``length`` + 1 ids that
    share one.
    """

    def __init__(
        self, rows: Any, first: int, last: int, tokenizer: Tokenizer, name: str, field: str, length: int
    ) -> None:
        super().__init__(rows, first, last, tokenizer, name, field)
        self._end = tokenizer.special.need("eos")
        self._length = length
        probed = self._probed()
        mean = sum(len(one) + 1 for one in probed) / len(probed)
        self.per_block = max(1, int(mean * self._count / self.blocks) // length)
        self._block = lru_cache(maxsize=2)(self._tokens)

    def __getitem__(self, number: int) -> np.ndarray:
        import numpy as np

        block, window = divmod(number, self.per_block)
        tokens = self._block(block)
        places = np.arange(window * self._length, (window + 1) * self._length + 1) % len(tokens)
        return np.asarray(tokens[places], dtype=np.int64)

    def _tokens(self, block: int) -> np.ndarray:
        import numpy as np

        texts = self._texts(self._rows_of(block))
        ids = [one for document in self._tokenizer.encode_batch(texts) for one in (*document, self._end)]
        return np.array(ids, dtype=np.int32)


class _Spanned(NamedTuple):
    """The spans of a block. tokens: [T] int32. edges: [n, 2], where each begins and ends. rows: [n], whose it is."""

    tokens: np.ndarray
    edges: np.ndarray
    rows: np.ndarray


class RowSpans(_RowPieces):
    """ERNIE's pieces: every row cut in spans as ``ernie.Spans`` cuts the documents of a store.

    Several tasks go through the blocks in different orders, so a block for each is kept.
    Raises DataError where rows are too short for a span.
    """

    def __init__(
        self, rows: Any, first: int, last: int, tokenizer: Tokenizer, name: str, field: str, longest: int
    ) -> None:
        super().__init__(rows, first, last, tokenizer, name, field)
        self._longest = longest
        probed = self._probed()
        found = int(spans_of(probed, longest).sum())
        if not found:
            raise DataError(f"{name}: no row has the {SHORTEST_SPAN} tokens a sentence pair needs")
        self.per_block = max(1, int(found * self._count / len(probed) / self.blocks))
        self._block = lru_cache(maxsize=_TASKS)(self._cut)

    def document(self, number: int) -> int:
        """The row that a span is from; of spans that begin again, another number."""
        block, span = divmod(number, self.per_block)
        rows = self._block(block).rows
        return int(rows[span % len(rows)]) + span // len(rows) * (self._first + self._count)

    def __getitem__(self, number: int) -> np.ndarray:
        import numpy as np

        block, span = divmod(number, self.per_block)
        tokens, edges, _ = self._block(block)
        begin, end = edges[span % len(edges)]
        return np.asarray(tokens[begin:end], dtype=np.int64)

    def _cut(self, block: int) -> _Spanned:
        import numpy as np

        numbers = self._rows_of(block)
        ids = self._tokenizer.encode_batch(self._texts(numbers))
        parts = spans_of(ids, self._longest)
        begins = np.cumsum([0, *map(len, ids)])
        edges = [
            (begin + len(row) * part // count, begin + len(row) * (part + 1) // count)
            for begin, row, count in zip(begins, ids, parts, strict=False)
            for part in range(count)
        ]
        if not edges:
            raise DataError(
                f"{self._name}: of rows {numbers[0]} to {numbers[-1]} none has the {SHORTEST_SPAN} tokens a sentence "
                "pair needs"
            )
        tokens = np.fromiter((one for row in ids for one in row), dtype=np.int32, count=int(begins[-1]))
        return _Spanned(tokens, np.array(edges), np.repeat(np.array(numbers), parts))


def spans_of(ids: Sequence[Sequence[int]], longest: int) -> np.ndarray:
    """[n]: how many spans each document is cut in."""
    import numpy as np

    return span_counts(np.array([len(one) for one in ids], dtype=np.int64), longest)


@dataclass(frozen=True)
class _BlockOrder:
    """Blocks in a random order, the windows of each in a random order; without a seed in the order of their numbers."""

    blocks: int
    windows: int
    seed: int | None
    stream: str

    def __getitem__(self, number: int) -> int:
        epoch, place = divmod(number, self.blocks * self.windows)
        if self.seed is None:
            return place
        block, window = divmod(place, self.windows)
        block = _permutation(self.blocks, self.seed, f"{self.stream}/blocks/{epoch}")[block]
        return (
            block * self.windows + _permutation(self.windows, self.seed, f"{self.stream}/block/{epoch}/{block}")[window]
        )


@lru_cache(maxsize=8)
def _permutation(count: int, seed: int, stream: str) -> Permutation:
    return Permutation(count, seed, stream)


def split_rows(
    name: str, field: str, split: Split, make: Callable[[Any, int, int], TokenPieces]
) -> TrainHeldout[TokenPieces]:
    """Pieces of a dataset: its first rows are trained on, those after them held out.

    make: pieces of the rows between two numbers. Raises DataError.
    """
    rows = open_dataset(name, field=field)
    first, last = split.cuts(len(rows))
    return TrainHeldout(make(rows, 0, first), make(rows, first, last) if split.heldout else None)
