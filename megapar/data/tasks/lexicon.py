"""Phrases and named entities that are masked whole, matched in ids by an automaton, longest first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np


class Lexicon:
    """Phrases and entities as sequences of ids. Matching takes one pass over a piece, for any number of entries.

    Source: Aho and Corasick 1975, as implemented by pyahocorasick.
    """

    def __init__(self, entries: Iterable[tuple[int, ...]]) -> None:
        """Add the entries of at least two ids; a single id is already a word."""
        import ahocorasick

        self._automaton: Any = ahocorasick.Automaton(ahocorasick.STORE_LENGTH, ahocorasick.KEY_SEQUENCE)
        for entry in entries:
            if len(entry) > 1:
                self._automaton.add_word(entry)
        if len(self._automaton):
            self._automaton.make_automaton()

    @classmethod
    def read(cls, paths: Iterable[str | Path], tokenizer: Tokenizer) -> Lexicon:
        """Read files with one entry per line. Raises DataError if a file cannot be read or is empty."""
        texts: list[str] = []
        for path in paths:
            try:
                lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path} cannot be read: {error}") from error
            if not any(lines):
                raise DataError(f"{path} contains no entries; it takes one per line")
            texts += [line for line in lines if line]
        return cls(map(tuple, tokenizer.encode_batch(texts)))

    def __len__(self) -> int:
        """Return the number of entries of at least two ids."""
        return len(self._automaton)

    def spans(self, ids: np.ndarray, starts: np.ndarray) -> list[tuple[int, int]]:
        """Return [start, end) of the entries in ids [T], in order and without overlap.

        Entries begin and end at word boundaries. Among overlapping ones the longest wins, then the leftmost.
        ``starts`` [T] bool is True at the first id of each word.
        """
        if not len(self._automaton):
            return []
        matches = [(end + 1 - length, end + 1) for end, length in self._automaton.iter(tuple(ids.tolist()))]
        whole = [(a, b) for a, b in matches if starts[a] and (b == len(ids) or starts[b])]
        taken: list[tuple[int, int]] = []
        for a, b in sorted(whole, key=lambda span: (span[0] - span[1], span[0])):
            if all(b <= other[0] or a >= other[1] for other in taken):
                taken.append((a, b))
        return sorted(taken)

    def unit_starts(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return [T] bool, True at the first id of every unit: of each entry, and of each word outside entries."""
        units: np.ndarray = starts.copy()
        for a, b in self.spans(ids, starts):
            units[a + 1 : b] = False
        return units
