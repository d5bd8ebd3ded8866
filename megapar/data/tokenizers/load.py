"""The choice of a tokenizer's class by what its folder or file has."""

from __future__ import annotations

from pathlib import Path

from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.errors import DataError
from megapar.files.tokenizer_files import foreign_tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer at ``path``: a sentencepiece model, a ``tokenizer.json``, or a Hugging Face folder.

    Code in a folder is never run. Raises DataError if the path has no usable tokenizer.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(
            f"{path}: no such tokenizer; --tokenizer-model takes a sentencepiece model file or a Hugging Face "
            "tokenizer folder on this machine"
        )
    if foreign := foreign_tokenizer(path):
        raise DataError(foreign)
    if path.is_dir() and (path / "tokenizer.model").is_file() and not any(path.glob("tokenizer*.json")):
        path /= "tokenizer.model"  # no other file requires another library
    if path.is_file() and path.suffix != ".json":
        from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(path.read_bytes(), name=str(path))
    from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path)
