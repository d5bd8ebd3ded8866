"""Data that Python code passes to a run: token ids by number, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megapar.data.lazy_numpy import np
from megapar.data.sampling.samples import WeightedPiece
from megapar.errors import DataError


class TokenDataset(Protocol):
    """Sequences of token ids by number, as a map-style dataset of torch has them.

    A sequence must depend on nothing but its number, because each rank reads the ones that it needs, and a resumed run
    reads them again.
    """

    def __len__(self) -> int:
        """Return the number of sequences."""

    def __getitem__(self, number: int) -> Any:
        """Return [T] integers, a list, an array or a tensor, with 2 <= T <= S + 1 and 0 <= number < len.

        {"tokens": them, "weights": [T] numbers >= 0} also says how much the prediction of each id counts in the loss,
        which is divided by the sum of the weights in the global batch. The first id is not predicted.
        """


@dataclass(frozen=True)
class OwnData:
    """The data of a run, for ``train(config, data=...)``. A decoder predicts each id from those before it.

    Every epoch reads all training sequences once, in a new random order. Sequences with fewer than S + 1 ids,
    for S of ``--seq-length``, are padded, without loss on the padding.

    Attributes:
        name: Name of the content. Checkpoints record it, and a run resumes only with data of the same name.
        train: Training sequences.
        heldout: Held-out sequences, read in a random order that is the same in every run; None without an evaluation.
    """

    name: str
    train: TokenDataset
    heldout: TokenDataset | None = None


class CheckedPieces:
    """The sequences of a dataset as pieces of samples. Reading one raises DataError if its numbers are not usable."""

    def __init__(self, dataset: TokenDataset, name: str, seq_length: int, vocab_size: int) -> None:
        if len(dataset) < 1:
            raise DataError(f"{name} has no sequences")
        self._dataset = dataset
        self._name = name
        self._seq_length = seq_length
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.weighted(number).ids

    def weighted(self, number: int) -> WeightedPiece:
        sequence = self._dataset[number]
        if not isinstance(sequence, Mapping):
            return WeightedPiece(self._checked_ids(sequence, number))
        if set(sequence) != {"tokens", "weights"}:
            raise DataError(
                f"{self._name}: sequence {number} has the keys {sorted(map(str, sequence))}; return tokens and weights"
            )
        ids = self._checked_ids(sequence["tokens"], number)
        return WeightedPiece(ids, self._checked_weights(sequence["weights"], len(ids), number))

    def _checked_ids(self, sequence: Any, number: int) -> np.ndarray:
        ids = np.asarray(sequence)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 2 <= len(ids) <= self._seq_length + 1:
            raise DataError(
                f"{self._name}: sequence {number} is {ids.dtype} of shape {list(ids.shape)}; return 2 to "
                f"{self._seq_length + 1} integers (--seq-length and one more)"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{self._name}: sequence {number} has ids from {low} to {high}, outside of the {self._vocab_size} rows "
                "of --vocab-size"
            )
        return ids.astype(np.int64)

    def _checked_weights(self, sequence: Any, length: int, number: int) -> np.ndarray:
        given = np.asarray(sequence)
        if given.dtype.kind not in "biuf" or given.shape != (length,):
            raise DataError(
                f"{self._name}: the weights of sequence {number} are {given.dtype} of shape {list(given.shape)}; "
                f"return {length} numbers, one of each token"
            )
        with np.errstate(over="ignore"):  # an infinity is refused below
            weights = given.astype(np.float32)
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise DataError(
                f"{self._name}: the weights of sequence {number} are from {given.min()} to {given.max()}; return "
                "finite numbers, at least 0"
            )
        return weights
