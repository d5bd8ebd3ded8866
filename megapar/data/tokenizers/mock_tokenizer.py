"""The tokenizer of mock data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.data.tokenizers.tokenizer import SpecialTokens, WordMarks
from megapar.errors import DataError

if TYPE_CHECKING:
    import numpy as np


_NAMES = ("[PAD]", "[UNK]", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]")


class MockTokenizer:
    """Words ``t7``, ``t8``, .. for ids 7, 8, ..; ids 0 to 6 are the special tokens of a trained tokenizer."""

    special = SpecialTokens(pad=0, unk=1, bos=2, eos=3, cls=4, sep=5, mask=6)

    def __init__(self, size: int) -> None:
        """Take the number of ids. Raises DataError if the special tokens leave none for words."""
        if size <= len(_NAMES):
            raise DataError(f"a vocabulary of {size} ids has no room for words after {len(_NAMES)} special tokens")
        self.size = size

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """See Tokenizer."""
        import numpy as np

        return np.arange(len(_NAMES), self.size, dtype=np.int64)

    @cached_property
    def word_marks(self) -> WordMarks:
        """See Tokenizer. Every id is a word."""
        import numpy as np

        return WordMarks(np.ones(self.size, dtype=bool), np.ones(self.size, dtype=bool))

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {self._word(i): i for i in range(self.size)}

    @staticmethod
    def _word(i: int) -> str:
        return _NAMES[i] if i < len(_NAMES) else f"t{i}"

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        ids = (self._vocabulary.get(word, 1) for word in text.split())
        return [i if i >= len(_NAMES) else 1 for i in ids]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return " ".join(self._word(int(i)) for i in ids if int(i) >= len(_NAMES))

    def fingerprint(self) -> str:
        """See Tokenizer."""
        return f"mock-{self.size}"

    def save_hf(self, folder: str | Path) -> None:
        """See Tokenizer."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer(models.WordLevel(self._vocabulary, unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        roles = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")
        names: dict[str, Any] = {f"{role}_token": name for role, name in zip(roles, _NAMES, strict=True)}
        PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(str(folder))
