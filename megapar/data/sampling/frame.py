"""The form of ERNIE's samples, common to all objectives.

[CLS] part .. [SEP] part .. [SEP] pad ..        token types 0, 1, 1, ..; positions from 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megapar.data.sampling.samples import NO_LOSS, Sample
from megapar.data.tokenizers.tokenizer import Tokenizer, WordMarks

if TYPE_CHECKING:
    import numpy as np

PAIR_MARKS = 3  # [CLS], [SEP], [SEP]


@dataclass(frozen=True)
class Frame:
    """Makes samples of S positions from ids.

    Attributes:
        seq_length: S.
        cls: id of [CLS].
        sep: id of [SEP].
        pad: id of [PAD].
        mask: id of [MASK].
        ordinary: ids for random replacements.
        marks: Word boundaries of the tokenizer.
    """

    seq_length: int
    cls: int
    sep: int
    pad: int
    mask: int
    ordinary: np.ndarray
    marks: WordMarks

    @classmethod
    def of(cls, tokenizer: Tokenizer, seq_length: int) -> Frame:
        """Return the frame of a tokenizer. Raises DataError if it lacks one of [CLS], [SEP], [MASK], [PAD]."""
        need = tokenizer.special.need
        ids = (need("cls"), need("sep"), need("pad"), need("mask"))
        return cls(seq_length, *ids, tokenizer.ordinary_ids, tokenizer.word_marks)

    @property
    def pair_room(self) -> int:
        """Maximum number of ids of two parts together."""
        return self.seq_length - PAIR_MARKS

    def sample(self, *parts: tuple[np.ndarray, np.ndarray | None], label: int = NO_LOSS) -> Sample:
        """Return a sample: tokens, token_types, labels [S] int64, valid [S] bool, label [] int64.

        Args:
            parts: (input ids, labels) of each part; labels are None if no id of the part is predicted.
            label: Class of the sample; NO_LOSS if it has none.
        """
        import numpy as np

        tokens = np.full(self.seq_length, self.pad, dtype=np.int64)
        labels = np.full(self.seq_length, NO_LOSS, dtype=np.int64)
        types = np.zeros(self.seq_length, dtype=np.int64)
        tokens[0], end = self.cls, 1
        for kind, (shown, part_labels) in enumerate(parts):
            start, end = end, end + len(shown)
            tokens[start:end], tokens[end] = shown, self.sep
            if part_labels is not None:
                labels[start:end] = part_labels
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
