"""Hugging Face tokenizers, from a folder or a ``tokenizer.json``; code in a folder is never run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from megapar.data.lazy_numpy import np
from megapar.data.tokenizers.tokenizer import SpecialTokens, WordMarks
from megapar.errors import DataError
from megapar.files.tokenizer_files import check_largest, vocabulary_of

_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "bos": ("<s>", "<|begin_of_text|>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "cls": ("[CLS]", "<cls>"),
    "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>", "<mask:0>"),
}
_SPACE = "▁"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class HuggingFaceTokenizer:
    """A wrapper for a tokenizer of ``transformers``."""

    def __init__(self, path: str | Path) -> None:
        """Load a folder with a tokenizer, or a ``tokenizer.json``. Raises DataError if it cannot be used."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self._path = Path(path)
        with self._typed():
            vocabulary_of(self._path)  # the library makes tables of the size of the largest id
            if self._path.is_dir():
                self._inner: Any = AutoTokenizer.from_pretrained(
                    str(path), local_files_only=True, trust_remote_code=False
                )
            else:
                self._inner = PreTrainedTokenizerFast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
        self._inner.model_max_length = int(1e30)  # no warning: long documents are cut into samples later
        # Call the underlying library directly: the call of transformers costs as much as a short document.
        self._fast = getattr(self._inner, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        vocabulary: dict[str, int] = self._inner.get_vocab()
        if not vocabulary:
            raise DataError(f"{path}: the tokenizer contains no tokens")
        self.vocabulary = vocabulary
        self._size = max(vocabulary.values()) + 1
        with self._typed():
            check_largest(self._size - 1, len(vocabulary))

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Raise DataError for the library's errors, which have many types; a panic of Rust is not even an Exception."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"{self._path}: not a usable Hugging Face tokenizer ({error})") from error

    @property
    def size(self) -> int:
        return self._size

    @cached_property
    def special(self) -> SpecialTokens:
        """See Tokenizer. A role without a token falls back to another: eos to sep, cls to bos, and so on."""
        ids: dict[str, int | None] = {}
        for role in _USUAL_NAMES:
            declared = getattr(self._inner, f"{role}_token_id", None)
            usual = (self.vocabulary.get(name) for name in _USUAL_NAMES[role])
            ids[role] = declared if declared is not None else next((i for i in usual if i is not None), None)
        for role, other in (("eos", "sep"), ("sep", "eos"), ("bos", "cls"), ("cls", "bos"), ("pad", "eos")):
            if ids[role] is None:
                ids[role] = ids[other]
        return SpecialTokens(**ids)

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        special = self.special.ids | set(self.special_ids.tolist())
        return np.array(sorted(i for i in set(self.vocabulary.values()) if i not in special), dtype=np.int64)

    @cached_property
    def word_marks(self) -> WordMarks:
        """See Tokenizer. Supports the marks of sentencepiece (▁), byte-level (Ġ, Ċ) and WordPiece (##) tokens."""
        tokens = [""] * self.size
        for token, i in self.vocabulary.items():
            tokens[i] = token
        return WordMarks(*(np.array(marks) for marks in zip(*_marks(tokens), strict=True)))

    @cached_property
    def piece_bytes(self) -> np.ndarray | None:
        """See Tokenizer. Known for byte-level pieces, and for those of sentencepiece, by the decoder."""
        if self._fast is None:
            return None
        state = json.loads(self._fast.to_str())
        decoder = state.get("decoder") or {}
        steps = {step.get("type"): step for step in decoder.get("decoders") or [decoder]}
        byte_level, spaces = "ByteLevel" in steps, [step for step in steps.values() if _is_space(step)]
        if not byte_level and not spaces:
            return None
        added = {token["id"] for token in state.get("added_tokens") or ()}
        special = self.special.ids | set(self.special_ids.tolist())
        sizes = np.zeros(self.size, dtype=np.int64)
        for token, i in self.vocabulary.items():
            if i in special:
                continue
            if byte_level and i not in added:  # each of its characters is for a byte
                sizes[i] = len(token)
            elif "ByteFallback" in steps and _BYTE.fullmatch(token):
                sizes[i] = 1
            else:
                sizes[i] = len((token if i in added else token.replace(_SPACE, " ")).encode())
        return sizes

    @property
    def merges_or_scores(self) -> list[list[Any]] | None:
        """The merges in order, or each token's score: besides the vocabulary, these decide the ids of a text.

        None if the tokenizer has neither, or does not expose them. Older libraries write a merge as one string.
        """
        if self._fast is None:
            return None
        model = json.loads(self._fast.to_str()).get("model") or {}
        if model.get("merges"):
            return [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]]
        vocabulary = model.get("vocab")
        return vocabulary if isinstance(vocabulary, list) else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        with self._typed():
            if self._fast is not None:
                encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
                return [encoding.ids for encoding in encodings]
            encoded = self._inner(
                list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
            )
            return [list(ids) for ids in encoded["input_ids"]]

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's chat template, the default one of several; None if it has none."""
        template = getattr(self._inner, "chat_template", None)
        return template.get("default") if isinstance(template, dict) else template

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        """Replace the template, also of ``save_hf``."""
        self._inner.chat_template = template

    @cached_property
    def template_variables(self) -> dict[str, str]:
        """The special tokens by the names that chat templates use, such as ``bos_token``."""
        return {name: str(token) for name, token in self._inner.special_tokens_map.items() if isinstance(token, str)}

    @cached_property
    def special_ids(self) -> np.ndarray:
        """[..] int64: the ids of all special tokens, also of those without a role, ascending."""
        added = getattr(self._inner, "added_tokens_decoder", {})
        ids = {i for i, token in added.items() if getattr(token, "special", False)} | set(self._inner.all_special_ids)
        return np.array(sorted(ids), dtype=np.int64)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a text's ids [T] and the characters [begin, end) of each, [T, 2] int64. Raises DataError."""
        if self._fast is None:
            raise DataError(
                f"{self._path}: this tokenizer does not say which characters a token is from, which fine-tuning "
                "needs; convert it to a tokenizer.json"
            )
        with self._typed():
            encoding = self._fast.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=np.int64), offsets

    def shown(self, ids: Sequence[int]) -> str:
        """Return the text of these ids with special tokens."""
        with self._typed():
            return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        with self._typed():
            return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=True))

    def fingerprint(self) -> str:
        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is not None:
            content = backend.to_str()
        else:
            content = repr((type(self._inner).__name__, sorted(self.vocabulary.items())))
        return hashlib.sha256(f"{content}{self.special}".encode()).hexdigest()[:32]

    def save_hf(self, folder: str | Path) -> None:
        self._inner.save_pretrained(str(folder))


def _is_space(step: Mapping[str, Any]) -> bool:
    """Return True for a step of a decoder that makes the mark of sentencepiece a space."""
    replaced = step.get("pattern") or {}
    return _SPACE in (step.get("replacement"), replaced.get("String") if isinstance(replaced, dict) else None)


def _marks(tokens: Sequence[str]) -> list[tuple[bool, bool]]:
    """Return (begins a word, the next token begins a word) for each token, by the marks that this vocabulary uses."""
    wordpiece = sum(token.startswith("##") for token in tokens) > len(tokens) // 100
    byte_level = not wordpiece and sum(token.startswith("Ġ") for token in tokens) > len(tokens) // 100
    if wordpiece:
        return [(not token.startswith("##"), False) for token in tokens]
    space, breaks = ("Ġ", ("Ċ", "ĉ", "č")) if byte_level else ("▁", ("\n", "\t", "\r"))
    marks = []
    for token in tokens:
        token = "\n" if token == "<0x0A>" else token
        blank = not token.strip(space + "".join(breaks)) and token != ""
        marks.append((token.startswith((space, *breaks)), blank or token.endswith(breaks)))
    return marks
