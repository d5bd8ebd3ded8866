"""What a run does because nothing was said: built-in text, nothing saved. Told at the start, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megapar.config.draft import is_from_file
from megapar.errors import Complaint

LONG_RUN = 1000
"""Steps from which a run is worth keeping; shorter ones try something out."""

LARGE_MODEL = 10**9
"""Parameters of attention and MLP, as 12 x layers x hidden size^2, from which nobody means two megabytes of text."""


class Unsaid(NamedTuple):
    """refused: what a run may not do unasked. notes: what it may."""

    refused: tuple[Complaint, ...]
    notes: tuple[Complaint, ...]


def check_unsaid(values: Mapping[str, Any], origins: Mapping[str, str]) -> Unsaid:
    """Of flat values, any of which may be missing, and where they are from."""
    text, saving = _built_in_text(values, origins), _saving(values)
    grave = text is not None and _is_published(values, origins)
    notes = [*saving] if grave or text is None else [text, *saving]
    return Unsaid((text,) if text is not None and grave else (), tuple(notes))


def _built_in_text(values: Mapping[str, Any], origins: Mapping[str, str]) -> Complaint | None:
    if origins.get("data_path", "default") != "default" or values.get("data_source") == "hf":
        return None
    message = "Without --data-path a run trains on the built-in text: Python's documentation, about 2 MB."
    return Complaint("data-builtin", message, "Give --data-path; builtin or mock, too, where that is meant.")


def _is_published(values: Mapping[str, Any], origins: Mapping[str, str]) -> bool:
    """A configuration that names its ranks, or a model that is too large for the built-in text."""
    ranks = values.get("world_size") or 1
    matrices = 12 * (values.get("num_layers") or 0) * (values.get("hidden_size") or 0) ** 2
    return (is_from_file(origins.get("world_size")) and ranks > 1) or matrices >= LARGE_MODEL


def _saving(values: Mapping[str, Any]) -> list[Complaint]:
    steps = values.get("train_iters") or 0
    if steps < LONG_RUN:
        return []
    if not values.get("save"):
        left = "--save-hf alone can be started from, not gone on with." if values.get("save_hf") else "Nothing is left."
        return [Complaint("no-save", f"{steps:,} steps without --save: {left}", "Give --save and --save-interval.")]
    before_the_end = ("save_interval", "save_interval_minutes", "exit_interval", "exit_duration_minutes")
    if not any(values.get(name) for name in before_the_end):
        message = f"--save {values['save']} without --save-interval: the {steps:,} steps are saved at the end only."
        return [Complaint("no-save-interval", message, "Give --save-interval or --save-interval-minutes.")]
    return []
