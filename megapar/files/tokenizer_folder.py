"""Folder in which a run stores its tokenizer.

Tested in ``tests/training/checkpoints/test_identity.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from megapar.files.regular_file import read_regular

FOLDER = "tokenizer"
FACTS = "megapar.json"


def stored_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint in a folder that ``data.tokenizers.stored_tokenizer`` wrote, None for other folders."""
    try:
        facts = json.loads(read_regular(folder / FACTS))
    except (OSError, ValueError, RecursionError):
        return None
    fingerprint = facts.get("fingerprint") if isinstance(facts, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None
