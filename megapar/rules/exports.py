"""Limits of the published classes: rows for ``--save-hf``, and the same check for an existing model.

The classes list their limits in ``model/*/published.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapar.model.architectures import ARCHITECTURES
from megapar.model.spec import MODELS
from megapar.schema.published import Limit
from megapar.schema.rule import Rule

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
