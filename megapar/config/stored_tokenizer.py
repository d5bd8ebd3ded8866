"""Tokenizer stored next to a run's checkpoints, used if none is named. Standard library only.

Tested in ``tests/training/checkpoints/test_identity.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

from megapar.config.draft import Draft
from megapar.config.files import saved_steps
from megapar.config.launch_environment import starts_before
from megapar.config.regular_file import read_regular

FOLDER = "tokenizer"
FACTS = "megapar.json"
_MOCK = ("mock",)


def stored_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint in a folder that ``data.tokenizers.stored_tokenizer`` wrote, None for other folders."""
    try:
        facts = json.loads(read_regular(folder / FACTS))
    except (OSError, ValueError, RecursionError):
        return None
    fingerprint = facts.get("fingerprint") if isinstance(facts, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None


def take_stored_tokenizer(draft: Draft) -> None:
    """Set --tokenizer-model, if it is not given, to the tokenizer that was stored with the weights.

    The weights were trained on its ids. A tokenizer trained again, on documents that have changed since, would give
    every id another meaning. A restarted job uses its own --save folder, from which it continues.
    """
    if draft.origins.get("tokenizer_model") != "default" or draft.values.get("data_path") == _MOCK:
        return
    restarted_from = draft.values.get("save") if starts_before(draft.environ) else None
    for root in (restarted_from, draft.values.get("load")):
        if root and stored_fingerprint(Path(root) / FOLDER) is not None and saved_steps(Path(root)):
            draft.values["tokenizer_model"] = str(Path(root) / FOLDER)
            draft.origins["tokenizer_model"] = "derived"
            return
