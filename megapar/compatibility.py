"""Compatibility matrix: rows of data, all of which are evaluated, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.errors import Complaint
from megapar.model.spec import MODELS
from megapar.rules import ampipe, data, dispatch, layout, model, not_built, pipeline, progressive, runtime, training
from megapar.schema.phase_plan import parse_phases
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
    *runtime.RULES,
    *data.RULES,
    *pipeline.RULES,
    *ampipe.RULES,
    *dispatch.RULES,
    *progressive.RULES,
    *runtime.TRACKERS,
    *not_built.RULES,
)


@dataclass(frozen=True)
class RuleFindings:
    """Result of the rows for one configuration.

    Attributes:
        refused: Complaints of the broken rows.
        not_built: Complaints about requested features of a later version.
        warnings: Texts of the broken downgrade and advice rows.
        sets: Values that the downgrades apply, by field name.
        by: Id of the downgrade that changes a value, by field name.
    """

    refused: tuple[Complaint, ...]
    not_built: tuple[Complaint, ...]
    warnings: tuple[str, ...]
    sets: Mapping[str, Any]
    by: Mapping[str, str]


def check(
    values: Mapping[str, Any], strict: bool = False, rules: Iterable[Rule] = (*RULES, *model.UNREACHED)
) -> RuleFindings:
    """Evaluate all rows on flat values by name; ``schema.rule.Facts`` lists the values that are not flags.

    A row that reads a missing value is skipped. ``strict`` enables the lifted rows again.
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
    for place, phase in _phases(values):
        for rule in RULES:
            kinds = (REFUSE, NOT_BUILT, LIFTED) if strict else (REFUSE, NOT_BUILT)
            checked = rule.kind in kinds and "data_phases" not in rule.reads
            if checked and rule.broken(phase) and not rule.broken(values):
                found = not_built if rule.kind == NOT_BUILT else refused
                text = f"in the phase from {place} on: {rule.text(phase)}"
                found.append(Complaint(rule.id, text, rule.advice(phase)))
    return RuleFindings(tuple(refused), tuple(not_built), tuple(warnings), sets, by)


def _phases(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each phase with another length or batch, and the values of a run that is this phase."""
    for phase in parse_phases(values["data_phases"]) if values.get("data_phases") else ():
        own = {"seq_length": phase.seq_length, "global_batch_size": phase.batch}
        own = {name: value for name, value in own.items() if value is not None and value != values.get(name)}
        if not own:
            continue
        requested = {**values.get("requested", {}), **own}
        if phase.batch is not None:
            requested["gradient_merge_acc_step"] = own["rampup_batch_size"] = None
        phase_values = {**values, **own, "requested": requested}
        if phase.batch is not None and {"micro_batch_size", "data_ranks"} <= values.keys():
            step = values["micro_batch_size"] * values["data_ranks"]
            phase_values["gradient_merge_acc_step"] = max(1, phase.batch // step)
        yield phase.place, phase_values
