"""Files of a tokenizer, and the folder in which a run stores its own."""

from __future__ import annotations

from pathlib import Path

from megapar.files.content import not_itself
from megapar.files.location import Place, at

FOLDER = "tokenizer"
FACTS = "megapar.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
"""Every folder with a tokenizer contains one of these; a sentencepiece model may have any name before ``.model``."""


def foreign_tokenizer(path: Path) -> str:
    """Return the sentence about a file of a tokenizer that is not what its name says; "" if there is none."""
    names = TOKENIZER_FILES[:-1] if (path / TOKENIZER_FILES[0]).exists() else TOKENIZER_FILES
    files = [path] if path.is_file() else [file for name in names for file in sorted(path.glob(name))]
    return next((f"{file} {other}" for file in files if file.is_file() and (other := not_itself(file))), "")


def stored_fingerprint(folder: Place) -> str | None:
    """Return the fingerprint in a folder that ``data.tokenizers.stored_tokenizer`` wrote, None for other folders."""
    try:
        fingerprint = (at(folder) / FACTS).json().get("fingerprint")
    except (OSError, ValueError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None
