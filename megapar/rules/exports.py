"""Limits of the published classes: rows for ``--save-hf``, and the same check for an existing model.

The classes list their limits in ``model/*/published.py``. Standard library only.

Tested in ``tests/training/test_exports.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megapar.model.architectures import ARCHITECTURES, model_of_architecture, own_architecture
from megapar.model.sizes import ModelSizes
from megapar.model.spec import MODELS, spec_of
from megapar.schema.published import Limit, PublishedArchitecture, Settings
from megapar.schema.rule import Rule, show

_KEPT = "Leave --save-hf out: checkpoints of --save keep every weight."
_LISTED = [
    (spec.kind, one.name, limit)
    for spec in MODELS.values()
    for one in spec.published.architectures
    for limit in one.limits
]
LIMITS: tuple[Limit, ...] = tuple({limit.id: limit for _, _, limit in _LISTED}.values())


def _rule(limit: Limit) -> Rule:
    """Build the row that refuses models beyond the limit if --save-hf is set."""
    names = frozenset(name for _, name, one in _LISTED if one is limit)
    kinds = tuple(dict.fromkeys(kind for kind, _, one in _LISTED if one is limit))
    return Rule(
        id=limit.id,
        reads=("save_hf", "export_class", *limit.reads),
        when=lambda f: f.save_hf is not None and f.export_class in names,
        requires=limit.within,
        message=limit.message,
        fix=" ".join(part for part in (_KEPT, limit.instead, limit.way) if part),
        source="Hugging Face format",
        passing=f"--save-hf exported {limit.passing}".strip(),
        failing=f"--save-hf exported {limit.failing}",
        models=kinds,
    )


RULES = tuple(_rule(limit) for limit in LIMITS if limit.failing)


def export_class(values: Mapping[str, Any], published: str | None) -> str | None:
    """Return the class that --save-hf writes, or None if a value that decides is missing.

    ``published``: class of the published folder that the model was loaded from.
    """
    if published is not None:
        return ARCHITECTURES[published].trained_as or published
    forms = (spec.published for spec in MODELS.values() if spec.kind == values.get("kind"))
    return next((form.own(values) for form in forms if form.architectures), None)


def not_exportable(sizes: ModelSizes, architecture: PublishedArchitecture | None = None) -> str | None:
    """Return the reason why the class, by default the model's own one, cannot represent this model; None if it can."""
    own = own_architecture(sizes)
    if own is None:
        return f"{spec_of(sizes).title} has no Hugging Face format"
    architecture = architecture or own
    if model_of_architecture(architecture.name) is not spec_of(sizes):
        return f"{architecture.name} is not {spec_of(sizes).title}"
    settings = spec_of(sizes).published.settings(sizes)
    if not (reasons := _exceeded(architecture, settings)):
        return None
    other = "No supported class can represent it"
    if architecture.name != own.name and not _exceeded(own, settings):
        other = f"{own.name} can, and is written if no published folder is stored next to the checkpoint"
    return (
        f"{architecture.name} cannot represent this model: {'; '.join(reasons)}. {other}; the checkpoint keeps every "
        "weight"
    )


def _exceeded(architecture: PublishedArchitecture, settings: Settings) -> list[str]:
    """Return the limits of the class that a model with these settings violates, with the settings."""
    reasons = []
    for limit in architecture.limits:
        # A model without experts has no expert settings.
        if any(read not in settings for read in limit.reads) or limit.within(SimpleNamespace(**settings)):
            continue
        values = ", ".join(f"{read} {show(settings[read])}" for read in limit.reads)
        reasons.append(f"{limit.message} ({values}){': ' + limit.way.rstrip('.') if limit.way else ''}")
    return reasons
