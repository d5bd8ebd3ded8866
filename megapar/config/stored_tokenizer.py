"""Tokenizer stored next to a run's checkpoints, used if none is named."""

from __future__ import annotations

from pathlib import Path

from megapar.config.draft import Draft
from megapar.config.files import saved_steps
from megapar.config.vocab_size import MOCK
from megapar.files.tokenizer_folder import FOLDER, stored_fingerprint
from megapar.launch_environment import starts_before


def take_stored_tokenizer(draft: Draft) -> None:
    """Set --tokenizer-model, if it is not given, to the tokenizer that was stored with the weights.

    The weights were trained on its ids. A tokenizer trained again, on documents that have changed since, would give
    every id another meaning. A restarted job uses its own --save folder, from which it continues.
    """
    if draft.origins.get("tokenizer_model") != "default" or draft.values.get("data_path") == MOCK:
        return
    restarted_from = draft.values.get("save") if starts_before(draft.environ) else None
    for root in (restarted_from, draft.values.get("load")):
        if root and stored_fingerprint(Path(root) / FOLDER) is not None and saved_steps(Path(root)):
            draft.values["tokenizer_model"] = str(Path(root) / FOLDER)
            draft.origins["tokenizer_model"] = "derived"
            return
