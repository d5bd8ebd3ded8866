"""Folder in which a run stores its tokenizer.

Tested in ``tests/training/checkpoints/test_identity.py``.
"""

from __future__ import annotations

from pathlib import Path

from megapar.files.regular_file import read_json

FOLDER = "tokenizer"
FACTS = "megapar.json"


def stored_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint in a folder that ``data.tokenizers.stored_tokenizer`` wrote, None for other folders."""
    try:
        fingerprint = read_json(folder / FACTS).get("fingerprint")
    except (OSError, ValueError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None
