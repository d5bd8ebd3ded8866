"""Consequences of defaults that may be unintended (built-in text, nothing saved): notes at the start, or refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megapar.config.draft import is_from_file
from megapar.errors import Complaint

LONG_RUN = 1000
"""Steps from which a run is worth saving; shorter runs are experiments."""

LARGE_MODEL = 10**9
"""Parameters of attention and MLP, 12 x layers x hidden size^2, from which training on 2 MB of text is a mistake."""


class DefaultNotes(NamedTuple):
    """Findings about defaults.

    Attributes:
        refused: Complaints about defaults that must be confirmed by setting the flag.
        notes: Notes about defaults that are allowed.
    """

    refused: tuple[Complaint, ...]
    notes: tuple[Complaint, ...]


def check_defaults(values: Mapping[str, Any], origins: Mapping[str, str]) -> DefaultNotes:
    """Return the findings for flat values, any of which may be missing, and their origins."""
    text, saving = _built_in_text(values, origins), _saving(values)
    refused = text is not None and _is_published(values, origins)
    notes = [*saving] if refused or text is None else [text, *saving]
    return DefaultNotes((text,) if text is not None and refused else (), tuple(notes))


def _built_in_text(values: Mapping[str, Any], origins: Mapping[str, str]) -> Complaint | None:
    if origins.get("data_path", "default") != "default" or values.get("data_source") == "hf":
        return None
    message = "Without --data-path, a run trains on the built-in text: Python's documentation, about 2 MB."
    return Complaint("data-builtin", message, "Set --data-path, to builtin or mock if that is intended.")


def _is_published(values: Mapping[str, Any], origins: Mapping[str, str]) -> bool:
    """Return True for a configuration file that sets world_size, or a model too large for the built-in text."""
    ranks = values.get("world_size") or 1
    matrices = 12 * (values.get("num_layers") or 0) * (values.get("hidden_size") or 0) ** 2
    return (is_from_file(origins.get("world_size")) and ranks > 1) or matrices >= LARGE_MODEL


def _saving(values: Mapping[str, Any]) -> list[Complaint]:
    steps = values.get("train_iters") or 0
    if steps < LONG_RUN:
        return []
    if not values.get("save"):
        result = "Nothing is saved."
        if values.get("save_hf"):
            result = "--save-hf stores only the model, from which a run can start but not continue."
        return [Complaint("no-save", f"{steps:,} steps without --save: {result}", "Set --save and --save-interval.")]
    before_the_end = ("save_interval", "save_interval_minutes", "exit_interval", "exit_duration_minutes")
    if not any(values.get(name) for name in before_the_end):
        message = f"--save {values['save']} without --save-interval: the {steps:,} steps are only saved at the end."
        return [Complaint("no-save-interval", message, "Set --save-interval or --save-interval-minutes.")]
    return []
