"""Rows on the sizes that every model has, and on the limits of the published classes for ``--save-hf``.

The classes list their limits in ``model/*/published.py``; ``export_class`` says which one applies to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapar.model.architectures import ARCHITECTURES
from megapar.model.spec import MODELS
from megapar.schema.published import Limit
from megapar.schema.rule import Rule, near_divisors, near_multiples

_KEPT = "Leave --save-hf out: checkpoints of --save keep every weight."
_LISTED = [
    (spec.kind, architecture.name, limit)
    for spec in MODELS.values()
    for architecture in spec.published.architectures
    for limit in architecture.limits
]
LIMITS: tuple[Limit, ...] = tuple({limit.id: limit for _, _, limit in _LISTED}.values())


def _rule(limit: Limit) -> Rule:
    """Build the row that refuses models beyond the limit if --save-hf is set."""
    names = frozenset(name for _, name, other in _LISTED if other is limit)
    kinds = tuple(dict.fromkeys(kind for kind, _, other in _LISTED if other is limit))
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


EXPORTS = tuple(_rule(limit) for limit in LIMITS if limit.failing)
UNREACHED = tuple(_rule(limit) for limit in LIMITS if not limit.failing)
"""Rows that other ones leave nothing to refuse, and that have no example therefore; a new choice may change that."""


def export_class(values: Mapping[str, Any], published: str | None) -> str | None:
    """Return the class that --save-hf writes, given a loaded folder's; None if a value that decides is missing."""
    if published is not None:
        return ARCHITECTURES[published].trained_as or published
    forms = (spec.published for spec in MODELS.values() if spec.kind == values.get("kind"))
    return next((form.own(values) for form in forms if form.architectures), None)


RULES: tuple[Rule, ...] = (
    Rule(
        id="hidden-heads",
        reads=("hidden_size", "num_attention_heads", "requested"),
        when=lambda f: f.requested.get("head_dim") is None,
        requires=lambda f: f.hidden_size % f.num_attention_heads == 0,
        message="--num-attention-heads must divide --hidden-size if --head-dim is not given",
        fix=lambda f: (
            f"Choose --num-attention-heads {near_divisors(f.hidden_size, f.num_attention_heads)}, or --hidden-size "
            f"{near_multiples(f.num_attention_heads, f.hidden_size)}."
        ),
        source="models",
        passing="--hidden-size 256 --num-attention-heads 8",
        failing="--hidden-size 256 --num-attention-heads 6",
    ),
    Rule(
        id="positions",
        reads=("seq_length", "max_position_embeddings"),
        requires=lambda f: f.seq_length <= f.max_position_embeddings,
        message="--seq-length must be at most --max-position-embeddings, which a published model's config.json may set",
        fix=lambda f: f"Choose --max-position-embeddings {f.seq_length}, or --seq-length {f.max_position_embeddings}.",
        source="models",
        passing="--seq-length 256 --max-position-embeddings 512",
        failing="--seq-length 256 --max-position-embeddings 128",
    ),
    *EXPORTS,
)
