"""Variations of one command line on a number of ranks, refused or resolved as that line with more flags would be.

A search tries thousands of them, so the files are read once, only those rules are evaluated again that read a value
which differs, and groups of options without a change are shared. A rule sees only the values that it declares
(``schema.rule.Facts``), so its outcome cannot depend on anything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from megapar.arguments import Config, flat_values, grid_of, read_settings
from megapar.compatibility import RULES, RuleFindings, check
from megapar.config.config import FLAGS, build
from megapar.config.draft import Draft, is_from_file, is_given
from megapar.errors import Complaint, ConfigError
from megapar.schema.flag import from_flags

MISSING = object()


class _Read(dict[str, Any]):
    """Flat values that remember the names that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


class Variations:
    """One command line, varied by flags.

    Raises ConfigError if the line itself cannot be read.

    Attributes:
        kind: ``moe`` or ``ernie``.
        file_world_size: Number of ranks that a file sets, or None.

    Args:
        kind: ``moe`` or ``ernie``.
        argv: The command line.
        world_size: Number of ranks.
        free: Flags whose values in files are dropped.
    """

    def __init__(self, kind: str, argv: Sequence[str], world_size: int, free: Collection[str] = ()) -> None:
        draft = Draft(kind, {})
        self._published = read_settings(draft, [*argv, "--rules-only"])
        self.file_world_size = draft.values["world_size"] if is_from_file(draft.origins.get("world_size")) else None
        if draft.complaints:
            raise ConfigError(draft.complaints)
        self._stated = {name: draft.values[name] for name, origin in draft.origins.items() if is_given(origin)}
        self._dropped = {name: FLAGS[name].defaults[kind] for name in free if is_from_file(draft.origins.get(name))}
        draft.values.update(self._dropped)
        draft.origins.update(dict.fromkeys(self._dropped, "default"))
        draft.values["world_size"], draft.origins["world_size"] = world_size, "flag"
        self.kind = kind
        self._settings, self._origins = draft.values, draft.origins
        self._checked = self._flat({})[0]
        self._broken = {place for place, rule in enumerate(RULES) if rule.broken(self._checked)}
        self._readers: dict[str, list[int]] = defaultdict(list)
        for place, rule in enumerate(RULES):
            for name in rule.reads:
                self._readers[name].append(place)
        self._built: tuple[dict[str, Any], Config, Mapping[str, frozenset[str]]] | None = None

    def fixed(self, name: str) -> Any:
        """Return the value that the command line or a file sets for a flag, or ``MISSING`` if neither does."""
        return self._settings[name] if is_given(self._origins.get(name)) else MISSING

    def setting(self, name: str) -> Any:
        """Return the value of a flag before any is derived: of the line, of a file, or the default."""
        return self._settings.get(name)

    @property
    def of_files(self) -> dict[str, Any]:
        """Values of files that are dropped."""
        return {name: self._stated[name] for name in self._dropped}

    def unstated(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values to add to the command line for these changes; dropped ones get their defaults."""
        return {
            name: value
            for name, value in {**self._dropped, **changes}.items()
            if self._stated.get(name, MISSING) != value
        }

    def attempt(self, changes: Mapping[str, Any]) -> Config | list[Complaint]:
        """Return the configuration with other values of some flags, or the complaints if it cannot start.

        A value that a rule would switch off is a complaint: another variation is the same without it.
        """
        values, origins = self._flat(changes)
        findings = self._check(values)
        complaints = [*findings.refused, *findings.not_built]
        complaints += [
            Complaint(rule, f"{FLAGS[name].spelling} would be switched off.")
            for name, rule in findings.by.items()
            if name in changes
        ]
        if complaints:
            return complaints
        values.update(findings.sets)
        origins.update({name: f"switched off by {rule}" for name, rule in findings.by.items()})
        return self._build(values, origins, findings.warnings)

    def _flat(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return (flat values, origins)."""
        settings, origins = {**self._settings, **changes}, {**self._origins, **dict.fromkeys(changes, "flag")}
        draft = Draft(self.kind, {}, values=settings, origins=origins)
        return flat_values(draft, self._published), origins

    def _check(self, values: Mapping[str, Any]) -> RuleFindings:
        names = _differing(values, self._checked)
        again = {place for name in names for place in self._readers.get(name, ())}
        self._broken = (self._broken - again) | {place for place in again if RULES[place].broken(values)}
        self._checked = dict(values)
        strict = values.get("strict_seed_rules") is True
        return check(values, strict=strict, rules=[RULES[place] for place in sorted(self._broken)])

    def _build(self, values: dict[str, Any], origins: dict[str, str], warnings: tuple[str, ...]) -> Config:
        if self._built is None:
            config = build(self.kind, values, origins, warnings, (), (), grid_of(values))
            self._built = values, config, _reads(config, values)
            return config
        known, config, reads = self._built
        names = _differing(values, known)
        parts = {
            group: from_flags(type(getattr(config, group)), values)
            for group, read in reads.items()
            if not names.isdisjoint(read)
        }
        given = {item.name: parts.get(item.name, getattr(config, item.name)) for item in fields(Config)}
        unused = config.unused
        if not names.isdisjoint(unused):
            unused = MappingProxyType({name: values[name] for name in unused})
        return Config(
            **{
                **given,
                **{"origins": MappingProxyType(origins), "warnings": warnings, "grid": grid_of(values)},
                "unused": unused,
            }
        )


def _differing(values: Mapping[str, Any], others: Mapping[str, Any]) -> set[str]:
    """Return the names whose values differ or that only one of the two has."""
    names = {name for name, value in values.items() if others.get(name, MISSING) != value}
    return names | (others.keys() - values.keys())


def _reads(config: Config, values: Mapping[str, Any]) -> Mapping[str, frozenset[str]]:
    """Return, for each group of options, the names of the values that it was built from."""
    reads = {}
    for item in fields(Config):
        group = getattr(config, item.name)
        if item.name != "grid" and hasattr(group, "__dataclass_fields__"):
            read = _Read(values)
            from_flags(type(group), read)
            reads[item.name] = frozenset(read.names)
    return reads
