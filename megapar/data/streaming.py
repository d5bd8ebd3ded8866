"""Training straight from a ``datasets`` source: rows are tokenised when a sample asks for them, nothing is prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.config.record import FIELD, checked_text
from megapar.data.permutation import Permutation
from megapar.data.samples import PieceOrder
from megapar.data.store import Split
from megapar.data.tokenizer import Tokenizer
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

ROWS = 4096  # of a block, about
_PROBES = 256  # rows that are tokenised to learn how long they are


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
    except Exception as error:  # whatever datasets raises for what it cannot read
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
    """Nothing under it asks the network, which would try again and again before it says that a name is not here."""
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


class RowWindows:
    """Windows of ``length`` + 1 ids from the rows of a dataset, tokenised block by block.

    Some 4,096 neighbouring rows are a block. Its documents, joined by the end token, are cut in windows of S + 1 ids
    that share one; every block gives the same number of windows, learned from rows spread over the data, so that a
    sample's block follows from its number. A block that is longer leaves some ids out, a shorter one begins again.
    The last block that was read is kept. Pieces of one block follow each other in the order, blocks are permuted.
    """

    def __init__(
        self, rows: Any, first: int, last: int, tokenizer: Tokenizer, length: int, name: str, field: str = FIELD
    ) -> None:
        """rows: a dataset with a column ``field``; rows first .. last - 1 are used. name: for messages."""
        if last <= first:
            raise DataError(f"{name}: no rows are left for one of the two sides; give another --split")
        self._rows = rows
        self._first, self._count = first, last - first
        self._tokenizer = tokenizer
        self._end = tokenizer.special.need("eos")
        self._length = length
        self._name = name
        self._field = field
        self.blocks = max(1, self._count // ROWS)
        self.windows = max(1, int(self._mean_tokens() * self._count / self.blocks) // length)
        self._block = lru_cache(maxsize=2)(self._tokens)

    def __len__(self) -> int:
        return self.blocks * self.windows

    def __getitem__(self, number: int) -> np.ndarray:
        import numpy as np

        block, window = divmod(number, self.windows)
        tokens = self._block(block)
        places = np.arange(window * self._length, (window + 1) * self._length + 1) % len(tokens)
        return np.asarray(tokens[places], dtype=np.int64)

    def order(self, seed: int | None, stream: str) -> PieceOrder:
        """See samples.Ordered."""
        return _BlockOrder(self.blocks, self.windows, seed, stream)

    def _mean_tokens(self) -> float:
        count = min(_PROBES, self._count)
        numbers = sorted({self._first + i * self._count // count for i in range(count)})
        ids = self._tokenizer.encode_batch(self._texts(numbers))
        return sum(len(one) + 1 for one in ids) / len(ids)

    def _tokens(self, block: int) -> np.ndarray:
        import numpy as np

        first = self._first + self._count * block // self.blocks
        last = self._first + self._count * (block + 1) // self.blocks
        texts = self._texts(range(first, last))
        ids = [one for document in self._tokenizer.encode_batch(texts) for one in (*document, self._end)]
        return np.array(ids, dtype=np.int32)

    def _texts(self, numbers: Any) -> list[str]:
        field, texts = self._field, self._rows[list(numbers)][self._field]
        named = zip(numbers, texts, strict=True)
        return [checked_text(text, {field: text}, f"{self._name}, row {number}", field) for number, text in named]


@dataclass(frozen=True)
class _BlockOrder:
    """Blocks in a random order, the windows of each in a random order; without a seed as they stand."""

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


def row_windows(
    name: str, split: Split, tokenizer: Tokenizer, length: int, field: str = FIELD
) -> tuple[RowWindows, RowWindows | None]:
    """Both sides of a dataset: its first rows are trained on, the ones behind them held out (None by a share of 0).

    Raises DataError.
    """
    rows = open_dataset(name, field=field)
    first, last = split.cuts(len(rows))
    return (
        RowWindows(rows, 0, first, tokenizer, length, name, field),
        RowWindows(rows, first, last, tokenizer, length, name, field) if split.heldout else None,
    )
