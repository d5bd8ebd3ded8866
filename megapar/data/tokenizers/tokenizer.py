"""The tokenizer protocol (text to ids and back, special ids, word boundaries), and tokenizers of data without text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megapar.data.lazy_numpy import np
from megapar.errors import DataError


@dataclass(frozen=True)
class SpecialTokens:
    """The ids with a role; None if the tokenizer has no such token."""

    pad: int | None = None
    unk: int | None = None
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None

    @property
    def ids(self) -> frozenset[int]:
        """Every id that has a role."""
        values = (getattr(self, field.name) for field in fields(self))
        return frozenset(value for value in values if value is not None)

    def need(self, role: str) -> int:
        """Return the id of ``role``. Raises DataError if the tokenizer has none."""
        value = getattr(self, role)
        if value is None:
            raise DataError(
                f"the tokenizer has no {role} token, which is needed here; pass a --tokenizer-model that has one, or "
                "leave it out to train a tokenizer on the text"
            )
        return int(value)


@dataclass(frozen=True)
class WordMarks:
    """The ids that begin a word and those that end one, by white space or by the marks of the tokenizer.

    Attributes:
        starts: [size] bool, True if the id begins a word by itself.
        ends: [size] bool, True if the next id begins a word.
    """

    starts: np.ndarray
    ends: np.ndarray

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return [T] bool, True at ids [T] that are the first of a word; the first id always is."""
        starts = self.starts[tokens]
        starts[1:] |= self.ends[tokens[:-1]]
        if len(starts):
            starts[0] = True
        return np.asarray(starts)


class Tokenizer(Protocol):
    """Text to ids and back. Encoding adds no special token; with Hugging Face's, text that spells one is that one."""

    @property
    def size(self) -> int:
        """Number of ids; every id is below it."""

    @property
    def special(self) -> SpecialTokens:
        """The ids with a role."""

    @property
    def ordinary_ids(self) -> np.ndarray:
        """[..] int64: the ids of text, ascending, without special, control and unknown tokens."""

    @property
    def word_marks(self) -> WordMarks:
        """The ids at which words begin and end."""

    @property
    def piece_bytes(self) -> np.ndarray | None:
        """[size] int64: the UTF-8 bytes of the text that each id is for, 0 for special tokens; None if not known."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, without special tokens."""

    def fingerprint(self) -> str:
        """Return a hash of everything that decides the ids."""

    def save_hf(self, folder: str | Path) -> None:
        """Write the files with which ``transformers.AutoTokenizer.from_pretrained(folder)`` gives the same ids."""


_NAMES = ("[PAD]", "[UNK]", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]")


class _EveryIdIsAWord:
    """A tokenizer of data without text. Its first ids may be special tokens."""

    special = SpecialTokens()
    piece_bytes = None

    def __init__(self, size: int) -> None:
        """Take the number of ids."""
        self.size = size

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """See Tokenizer. All ids but the special ones."""
        return np.arange(len(self.special.ids), self.size, dtype=np.int64)

    @cached_property
    def word_marks(self) -> WordMarks:
        return WordMarks(np.ones(self.size, dtype=bool), np.ones(self.size, dtype=bool))


class NoTokenizer(_EveryIdIsAWord):
    """A placeholder for files of tokens without a tokenizer: the number of ids is known, but not their text."""

    def encode(self, text: str) -> list[int]:
        """Raise DataError."""
        raise DataError("text cannot be encoded without a tokenizer; pass --tokenizer-model")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Raise DataError."""
        raise DataError("text cannot be encoded without a tokenizer; pass --tokenizer-model")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids as numbers."""
        return " ".join(str(int(i)) for i in ids)

    def fingerprint(self) -> str:
        return f"none-{self.size}"

    def save_hf(self, folder: str | Path) -> None:
        """Write nothing: the model is saved without a tokenizer."""


class MockTokenizer(_EveryIdIsAWord):
    """Words ``t7``, ``t8``, .. for ids 7, 8, ..; ids 0 to 6 are the special tokens of a trained tokenizer."""

    special = SpecialTokens(pad=0, unk=1, bos=2, eos=3, cls=4, sep=5, mask=6)

    def __init__(self, size: int) -> None:
        """Take the number of ids. Raises DataError if the special tokens leave none for words."""
        if size <= len(_NAMES):
            raise DataError(f"a vocabulary of {size} ids has no room for words after {len(_NAMES)} special tokens")
        super().__init__(size)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {self._word(i): i for i in range(self.size)}

    @staticmethod
    def _word(i: int) -> str:
        return _NAMES[i] if i < len(_NAMES) else f"t{i}"

    def encode(self, text: str) -> list[int]:
        ids = (self._vocabulary.get(word, 1) for word in text.split())
        return [i if i >= len(_NAMES) else 1 for i in ids]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._word(int(i)) for i in ids if int(i) >= len(_NAMES))

    def fingerprint(self) -> str:
        return f"mock-{self.size}"

    def save_hf(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer(models.WordLevel(self._vocabulary, unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        names: dict[str, Any] = {f"{role}_token": _NAMES[i] for role, i in vars(self.special).items()}
        PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(str(folder))


def token_ids(tokenizer: Tokenizer | None, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id of a config.json.

    ``published`` is the config.json that the model was started from, or {}. Its ids remain if the tokenizer has no such
    token, and also if they are a list that contains the tokenizer's id.
    """
    ids = {}
    for role in ("bos", "eos", "pad"):
        name = f"{role}_token_id"
        old, new = published.get(name), None if tokenizer is None else getattr(tokenizer.special, role)
        taken = old if new is None or (isinstance(old, list) and new in old) else new
        if taken is not None:
            ids[name] = taken
    return ids
