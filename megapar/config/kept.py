"""The tokenizer that a run has kept beside its checkpoints, taken where none is named. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path

from megapar.config.draft import Draft
from megapar.config.files import saved_steps
from megapar.config.launched import starts_before
from megapar.config.regular_file import read_regular

FOLDER = "tokenizer"
FACTS = "megapar.json"
_MOCK = ("mock",)


def kept_fingerprint(folder: Path) -> str | None:
    """Of the tokenizer in a folder that ``data.tokenizers.kept_tokenizer.keep`` wrote; None where it did not."""
    try:
        facts = json.loads(read_regular(folder / FACTS))
    except (OSError, ValueError, RecursionError):
        return None
    found = facts.get("fingerprint") if isinstance(facts, dict) else None
    return found if isinstance(found, str) else None


def take_kept(draft: Draft) -> None:
    """Stand in for a --tokenizer-model that nobody gave: the weights were trained on the ids of the kept one.

    One trained anew on documents that have changed since would give every id another meaning. A job that was started
    again goes on from what it saved itself.
    """
    if draft.origins.get("tokenizer_model") != "default" or draft.values.get("data_path") == _MOCK:
        return
    again = draft.values.get("save") if starts_before(draft.environ) else None
    for root in (again, draft.values.get("load")):
        if root and kept_fingerprint(Path(root) / FOLDER) is not None and saved_steps(Path(root)):
            draft.values["tokenizer_model"] = str(Path(root) / FOLDER)
            draft.origins["tokenizer_model"] = "derived"
            return
