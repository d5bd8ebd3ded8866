"""The compatibility matrix: rows of data, all evaluated, in an order that does not matter. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.errors import Complaint
from megapar.model.spec import MODELS
from megapar.rules import ampipe, data, layout, model, not_built, pipeline, progressive, training
from megapar.schema.rule import ADVICE, DOWNGRADE, LIFTED, NOT_BUILT, REFUSE, SETTLED, Facts, Rule

__all__ = [
    "ADVICE",
    "DOWNGRADE",
    "LIFTED",
    "NOT_BUILT",
    "REFUSE",
    "RULES",
    "SETTLED",
    "Facts",
    "Rule",
    "RuleFindings",
    "check",
]

RULES: tuple[Rule, ...] = (
    *layout.RULES,
    *model.RULES,
    *(rule for spec in MODELS.values() for rule in spec.rules),
    *training.RULES,
    *data.RULES,
    *pipeline.RULES,
    *ampipe.RULES,
    *progressive.RULES,
    *not_built.RULES,
)


@dataclass(frozen=True)
class RuleFindings:
    """What the rows say of one configuration.

    refused: broken rows. not_built: features of a later version that were asked for. warnings: broken downgrades, and
    advice. sets: the settings that downgrades switch off; by: the row that does, of those that it changes.
    """

    refused: tuple[Complaint, ...]
    not_built: tuple[Complaint, ...]
    warnings: tuple[str, ...]
    sets: Mapping[str, Any]
    by: Mapping[str, str]


def check(values: Mapping[str, Any], strict: bool = False, rules: Iterable[Rule] = RULES) -> RuleFindings:
    """Evaluate all rows on flat values by name (see schema.rule.Facts for what is read beside flags).

    A row that reads a missing name is left out. ``strict`` turns lifted rows back on.
    """
    refused, not_built, warnings = [], [], []
    sets: dict[str, Any] = {}
    by: dict[str, str] = {}
    for rule in rules:
        if rule.kind == SETTLED or (rule.kind == LIFTED and not strict) or not rule.broken(values):
            continue
        complaint = Complaint(rule.id, rule.text(values), rule.advice(values))
        if rule.kind == NOT_BUILT:
            not_built.append(complaint)
        elif rule.kind in (DOWNGRADE, ADVICE):
            warnings.append(str(complaint))
            sets.update(rule.sets)
            by.update({name: rule.id for name, value in rule.sets if values.get(name) != value})
        else:
            refused.append(complaint)
    return RuleFindings(tuple(refused), tuple(not_built), tuple(warnings), sets, by)
