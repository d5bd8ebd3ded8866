"""Phrases and named entities that are masked whole, found in ids by an automaton, longest first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np


class Lexicon:
    """Entries as sequences of ids. Matching takes one pass over a piece, for any number of entries.

    Source: Aho and Corasick 1975, by pyahocorasick.
    """

    def __init__(self, entries: Iterable[tuple[int, ...]]) -> None:
        """entries: of at least two ids each count; a single id is a word already."""
        import ahocorasick

        self._automaton: Any = ahocorasick.Automaton(ahocorasick.STORE_LENGTH, ahocorasick.KEY_SEQUENCE)
        for entry in entries:
            if len(entry) > 1:
                self._automaton.add_word(entry)
        if len(self._automaton):
            self._automaton.make_automaton()

    @classmethod
    def read(cls, paths: Iterable[str | Path], tokenizer: Tokenizer) -> Lexicon:
        """Read files with one entry per line. Raises DataError for files that cannot be read or are empty."""
        texts: list[str] = []
        for path in paths:
            try:
                lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path} cannot be read: {error}") from error
            if not any(lines):
                raise DataError(f"{path} holds no entries; it takes one per line")
            texts += [line for line in lines if line]
        return cls(map(tuple, tokenizer.encode_batch(texts)))

    def __len__(self) -> int:
        """Entries of at least two ids."""
        return len(self._automaton)

    def spans(self, ids: np.ndarray, starts: np.ndarray) -> list[tuple[int, int]]:
        """[start, end) of entries in ids [T], apart from each other, in order.

        Longer ones go first, of equal ones the leftmost. They begin and end where words do. starts: [T] bool.
        """
        if not len(self._automaton):
            return []
        found = [(end + 1 - length, end + 1) for end, length in self._automaton.iter(tuple(ids.tolist()))]
        whole = [(a, b) for a, b in found if starts[a] and (b == len(ids) or starts[b])]
        taken: list[tuple[int, int]] = []
        for a, b in sorted(whole, key=lambda span: (span[0] - span[1], span[0])):
            if all(b <= other[0] or a >= other[1] for other in taken):
                taken.append((a, b))
        return sorted(taken)

    def unit_starts(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """[T] bool: the first id of every unit: of each entry, and of each word outside entries."""
        units: np.ndarray = starts.copy()
        for a, b in self.spans(ids, starts):
            units[a + 1 : b] = False
        return units
