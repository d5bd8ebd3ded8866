"""The tokenizer protocol: text to ids and back, special ids, and the beginnings of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SpecialTokens:
    """The ids with a role; None where the tokenizer has no such token."""

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
        """The id of ``role``; raises DataError where the tokenizer has none."""
        value = getattr(self, role)
        if value is None:
            raise DataError(
                f"the tokenizer has no {role} token, which is needed here; give a --tokenizer-model that has one, or "
                "leave it out beside text to have a tokenizer trained on that"
            )
        return int(value)


@dataclass(frozen=True)
class WordMarks:
    """The ids that begin a word and those that end one, by white space or by the mark of the tokenizer's kind.

    starts: [size] bool; the piece begins a word by itself.
    ends: [size] bool; the piece that follows begins a word.
    """

    starts: np.ndarray
    ends: np.ndarray

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """[T] ids -> [T] bool: whether each token is the first one of a word; the first token always is."""
        import numpy as np

        starts = self.starts[tokens]
        starts[1:] |= self.ends[tokens[:-1]]
        if len(starts):
            starts[0] = True
        return np.asarray(starts)


class Tokenizer(Protocol):
    """Text to ids and back. No special token is ever added by encoding, and none is made from text."""

    @property
    def size(self) -> int:
        """Number of ids; every id is below it."""

    @property
    def special(self) -> SpecialTokens:
        """The ids with a role."""

    @property
    def ordinary_ids(self) -> np.ndarray:
        """[..] int64: the ids that stand for text, ascending; no special, control or unknown token."""

    @property
    def word_marks(self) -> WordMarks:
        """The ids at which words begin and end."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out."""

    def fingerprint(self) -> str:
        """A hash of everything that decides the ids."""

    def save_hf(self, folder: str | Path) -> None:
        """Write what ``transformers.AutoTokenizer.from_pretrained(folder)`` needs to give the same ids."""


class NoTokenizer:
    """Stands where there is none, beside files of tokens: it knows how many ids there are, and nothing of them."""

    special = SpecialTokens()

    def __init__(self, size: int) -> None:
        """size: number of ids."""
        self.size = size

    @property
    def ordinary_ids(self) -> np.ndarray:
        """See Tokenizer. All ids."""
        import numpy as np

        return np.arange(self.size, dtype=np.int64)

    @property
    def word_marks(self) -> WordMarks:
        """See Tokenizer. Every id is a word."""
        import numpy as np

        return WordMarks(np.ones(self.size, dtype=bool), np.ones(self.size, dtype=bool))

    def encode(self, text: str) -> list[int]:
        """Raises DataError."""
        raise DataError("there is no tokenizer; give --tokenizer-model")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Raises DataError."""
        raise DataError("there is no tokenizer; give --tokenizer-model")

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers."""
        return " ".join(str(int(i)) for i in ids)

    def fingerprint(self) -> str:
        """See Tokenizer."""
        return f"none-{self.size}"

    def save_hf(self, folder: str | Path) -> None:
        """Writes nothing: the model is saved without a tokenizer."""


def token_ids(tokenizer: Tokenizer | None, published: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token_id, eos_token_id, pad_token_id of a config.json. published: the one a model was started from, or {}.

    What the tokenizer does not know of stays as published, and so does a list that has the tokenizer's id in it.
    """
    ids = {}
    for role in ("bos", "eos", "pad"):
        name = f"{role}_token_id"
        there, own = published.get(name), None if tokenizer is None else getattr(tokenizer.special, role)
        taken = there if own is None or (isinstance(there, list) and own in there) else own
        if taken is not None:
            ids[name] = taken
    return ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer at ``path``: a sentencepiece model, a ``tokenizer.json``, or a Hugging Face folder.

    Code that a folder carries is never run. Raises DataError where nothing usable is there.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"{path}: no such tokenizer; --tokenizer-model takes a sentencepiece model file or a Hugging Face "
            "tokenizer folder on this machine"
        )
    if path.is_dir() and (path / "tokenizer.model").is_file() and not any(path.glob("tokenizer*.json")):
        path /= "tokenizer.model"  # nothing there says that another library is to read it
    if path.is_file() and path.suffix != ".json":
        from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(path.read_bytes(), name=str(path))
    from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path)
