"""What every task's samples look like.

[CLS] part .. [SEP] part .. [SEP] pad ..        token types 0, 1, 1, ..; positions from 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megapar.data.draws import Draws
from megapar.data.samples import NO_LOSS, Sample
from megapar.data.tokenizer import Tokenizer, WordMarks

if TYPE_CHECKING:
    import numpy as np


class Task(Protocol):
    """One objective."""

    @property
    def name(self) -> str:
        """Of ``rules.tasks``."""

    def make(self, number: int, draws: Draws) -> Sample:
        """Sample ``number`` of this task; depends on it and on ``draws`` only."""


class Documents(Protocol):
    """Pieces that know which document they are from."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> np.ndarray: ...

    def document(self, number: int) -> int:
        """Which document piece ``number`` is from; equal numbers, equal documents."""


@dataclass(frozen=True)
class Frame:
    """How ids become a sample of ``seq_length`` positions. ordinary: ids that a random replacement may be."""

    seq_length: int
    cls: int
    sep: int
    pad: int
    mask: int
    ordinary: np.ndarray
    marks: WordMarks

    @classmethod
    def of(cls, tokenizer: Tokenizer, seq_length: int) -> Frame:
        """Raises DataError where the tokenizer lacks one of [CLS], [SEP], [MASK], [PAD]."""
        need = tokenizer.special.need
        ids = (need("cls"), need("sep"), need("pad"), need("mask"))
        return cls(seq_length, *ids, tokenizer.ordinary_ids, tokenizer.word_marks)

    def sample(self, *parts: tuple[np.ndarray, np.ndarray | None], label: int = NO_LOSS) -> Sample:
        """Each part: (ids as shown, labels or None where nothing is asked). label: the sample's class, if it has one.

        tokens, token_types, labels [S] int64, valid [S] bool, label [] int64.
        """
        import numpy as np

        tokens = np.full(self.seq_length, self.pad, dtype=np.int64)
        labels = np.full(self.seq_length, NO_LOSS, dtype=np.int64)
        types = np.zeros(self.seq_length, dtype=np.int64)
        tokens[0], end = self.cls, 1
        for kind, (shown, asked) in enumerate(parts):
            start, end = end, end + len(shown)
            tokens[start:end], tokens[end] = shown, self.sep
            if asked is not None:
                labels[start:end] = asked
            end += 1
            types[start:end] = min(kind, 1)
        valid = np.arange(self.seq_length) < end
        return {
            "tokens": tokens,
            "token_types": types,
            "labels": labels,
            "valid": valid,
            "label": np.array(label, dtype=np.int64),
        }


def cut_evenly(starts: np.ndarray, parts: int) -> list[slice]:
    """T ids in ``parts`` near-equal pieces, cut at the word start nearest to where an equal cut would be.

    starts: [T] bool. Every piece has at least one id; T must be at least ``parts``.
    """
    import numpy as np

    length, places = len(starts), np.flatnonzero(starts)
    edges = [0]
    for part in range(1, parts):
        wanted, low, high = length * part // parts, edges[-1] + 1, length - (parts - part)
        near = places[(places >= low) & (places <= high)]
        edges.append(int(near[np.abs(near - wanted).argmin()]) if len(near) else min(max(wanted, low), high))
    return [slice(a, b) for a, b in zip(edges, (*edges[1:], length), strict=True)]
