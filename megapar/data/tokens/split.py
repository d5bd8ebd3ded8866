"""The split of documents into training and held-out ones, and a pair of values for the two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class TrainHeldout(Generic[T]):
    """One value for the training documents and one for the held-out ones. heldout: None where nothing is held out."""

    train: T
    heldout: T | None

    def map(self, function: Callable[[T], U]) -> TrainHeldout[U]:
        """Applies a function to both values."""
        return TrainHeldout(function(self.train), None if self.heldout is None else function(self.heldout))


@dataclass(frozen=True)
class Split:
    """Shares of the documents by the hash of each text, as stretches of [0, 1).

    Files of tokens without hashes of their texts are split by the documents' numbers instead.

    train, heldout: shares of the documents; what they leave is not used. heldout may be 0.
    """

    train: float
    heldout: float

    @classmethod
    def parse(cls, text: str) -> Split:
        """``95,5`` or ``969,30,1``: weights of training, held-out and unused documents; raises DataError."""
        try:
            weights = [float(part) for part in text.split(",")]
        except ValueError:
            weights = []
        if len(weights) not in (2, 3) or min(weights) < 0 or weights[0] <= 0:
            raise DataError(
                f"the split {text!r} is not two or three weights, the first one above 0; write 95,5 or 969,30,1"
            )
        return cls(weights[0] / sum(weights), weights[1] / sum(weights))

    @property
    def trains_all(self) -> bool:
        """All documents are trained on."""
        return self.heldout == 0 and self.train > 1 - 1e-9

    def side(self, text: str) -> int | None:
        """0: trained on; 1: held out; None: neither."""
        place = place_of(text)
        if place < self.train or self.trains_all:
            return 0
        if self.heldout == 0:
            return None
        return 1 if place < self.train + self.heldout or self.train + self.heldout > 1 - 1e-9 else None

    def sides(self, places: np.ndarray) -> np.ndarray:
        """[n] int8: ``side`` of documents by their places in [0, 1), -1 for neither."""
        import numpy as np

        rest_held_out = self.train + self.heldout > 1 - 1e-9
        found = np.full(len(places), -1, dtype=np.int8)
        if self.heldout:
            found[(places < self.train + self.heldout) | rest_held_out] = 1
        found[(places < self.train) | self.trains_all] = 0
        return found

    def cuts(self, documents: int) -> tuple[int, int]:
        """The numbers where the training documents end, and where the held-out ones after them end."""
        train = round(documents * self.train)
        return train, max(train, min(documents, round(documents * (self.train + self.heldout))))


def place_of(text: str) -> float:
    """The place of a document in [0, 1): a hash of its text, so that copies of it are never on both sides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64
