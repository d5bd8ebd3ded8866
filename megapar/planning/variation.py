"""Other configurations near a given one, resolved and checked by the same rules as a command line.

``changed`` and ``widened`` vary one configuration, ``nearest`` and ``hints`` look for legal layouts. ``Variations``
varies one command line thousands of times, for a search: the files are read once, only those rules are evaluated again
that read a value which differs, and groups of options without a change are shared. A rule sees only the values that it
declares (``schema.rule.Facts``), so its outcome cannot depend on anything else.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from megapar.arguments import Config, flat_values, grid_of, parse, read_settings, resolved_values
from megapar.compatibility import RULES, RuleFindings, check
from megapar.config.config import FLAGS, NOT_BUILT_NOTE, build
from megapar.config.draft import Draft, is_from_file, is_given
from megapar.errors import Complaint, ConfigError
from megapar.launch_environment import ROUND, starts_before
from megapar.rules.layout import distance, layouts, near_degrees
from megapar.schema.flag import from_flags
from megapar.schema.rule import divisors

MISSING = object()
AXES = ["mp_degree", "pp_degree", "cp_degree", "ep_degree", "expert_mp_degree"]
LAYOUT = (
    *(*AXES, "sharding_degree", "dp_degree", "hybrid_dp", "gradient_merge_acc_step", "gradient_merge_mode"),
    *("overlap_grad_reduce", "overlap_param_gather"),
)
LEFT_OPEN = tuple(name for name in LAYOUT if name not in (*AXES, "gradient_merge_mode"))  # by ``widened``
# Changing how the model is split affects memory and speed more than changing the number of replicas.
_WEIGHTS = {"mp": 8.0, "pp": 8.0, "cp": 8.0, "ep": 4.0, "sharding": 2.0, "dp": 1.0}
FLAGGED = ("mp", "pp", "cp", "ep", "sharding")
MOST_TRIED = 5000
MOST_HINTS = 3

Degrees = Mapping[str, int]


def command_line(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that sets these values; ``None`` takes a flag's value away."""
    words: list[str] = []
    for name, value in values.items():
        flag = FLAGS[name]
        if isinstance(value, bool):
            words.append(flag.spelling if value else flag.negation)
        elif flag.takes_list and not flag.comma and value is not None:
            words += [flag.spelling, *map(str, value)]
        elif isinstance(value, tuple):
            words += [flag.spelling, ",".join(map(str, value))]
        else:
            words += [flag.spelling, str(value)]
    return words


def changed(config: Config, flags: Mapping[str, Any]) -> Config | None:
    """Return the same layout with other settings; None if the rules refuse it or nothing changes."""
    if not differing(config, flags):
        return None
    result = _resolved(config, {**_given(config), **flags}, config.grid.world_size)
    return replace(result, warnings=()) if result is not None else None


def widened(config: Config, flags: Mapping[str, Any], world_size: int) -> Config | None:
    """Return the same model and axes on more ranks, used for sharding, with other settings; None if it is refused."""
    kept = {name: value for name, value in _given(config).items() if name not in LEFT_OPEN}
    return _resolved(config, {**kept, **flags}, world_size)


def differing(config: Config, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of the configuration."""
    return {name: value for name, value in flags.items() if config.value(name) != value}


def _given(config: Config) -> dict[str, Any]:
    """Return the values that files and the command line set."""
    names, values = [flag.name for flag in FLAGS.values() if not flag.meta], config.values()
    return {name: values[name] for name in names if is_given(config.origins.get(name))}


def _resolved(config: Config, values: Mapping[str, Any], world_size: int) -> Config | None:
    """Return the configuration with these values; None if the rules refuse it or it is not built."""
    given = {name: value for name, value in values.items() if value is not None}
    line = [*command_line(given), "--rules-only", "--world-size", str(world_size)]
    try:
        result = parse(config.kind, line, {})
    except ConfigError:
        return None
    # With --rules-only they are notes; --validate-only and a plan refuse them.
    return None if any(note.startswith(NOT_BUILT_NOTE) for note in result.notes) else result


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


class Nearest(NamedTuple):
    """A legal layout.

    Attributes:
        flags: Flags of the run, with those of the layout at the end.
        changes: Description of the changes, such as ``sharding 4 -> 2``.
    """

    flags: tuple[str, ...]
    changes: str


def nearest(kind: str, flags: Sequence[str], requested_ranks: int, ranks: int) -> Nearest | None:
    """Return the layout for ``ranks`` ranks that keeps the global batch and is nearest to the requested one.

    Returns None if no layout is legal. Raises ConfigError if the rules refuse the flags for ``requested_ranks``.
    """
    requested = parse(kind, flags, _environ(requested_ranks))
    before = {axis: requested.grid.size(axis) for axis in _WEIGHTS}

    # Override a number of ranks that a file or the command line sets.
    world_size = ("--world-size", str(ranks)) if requested.origins["world_size"] != "derived" else ()

    def line(degrees: Degrees) -> Sequence[str]:
        return (*flags, *_layout_flags(degrees, requested), *world_size)

    # The expert parallel degree stays the same, or becomes a divisor of it.
    candidates = _layouts(ranks, {"ep": divisors(before["ep"])})
    for degrees in _legal(kind, ranks, before, line, candidates):
        changes = [f"{axis} {before[axis]} -> {degrees[axis]}" for axis in before if before[axis] != degrees[axis]]
        return Nearest(tuple(line(degrees)), ", ".join(changes) or "as requested")
    return None


def hints(kind: str, flags: Sequence[str], world_size: int) -> list[str]:
    """Return the flags of a few legal layouts near the refused one, smallest change first; [] for other complaints."""
    values = resolved_values(kind, [*flags, "--world-size", str(world_size), "--rules-only"], {})["requested"]
    if any(f"{axis}_degree" not in values for axis in FLAGGED):
        return []
    requested = {axis: int(values[f"{axis}_degree"] or 1) for axis in FLAGGED}
    free = requested["sharding"] == -1
    used = requested["mp"] * requested["pp"] * requested["cp"]
    before = {**requested, "sharding": max(1, world_size // used) if free else requested["sharding"], "dp": 1}

    def changed(degrees: Degrees) -> list[str]:
        axes = [axis for axis in FLAGGED if degrees[axis] != before[axis] and not (free and axis == "sharding")]
        return [part for axis in axes for part in (FLAGS[f"{axis}_degree"].spelling, str(degrees[axis]))]

    def line(degrees: Degrees) -> Sequence[str]:
        return (*flags, "--rules-only", "--world-size", str(world_size), *changed(degrees))

    choices = {axis: near_degrees(world_size, before[axis], 3) for axis in ("mp", "pp", "cp", "ep")}
    candidates = (d for d in _layouts(world_size, choices) if d["dp"] == 1 or not free)
    legal = _legal(kind, world_size, before, line, candidates)
    return list(dict.fromkeys(" ".join(changed(degrees)) or "as it is" for degrees in islice(legal, MOST_HINTS)))


def _legal(
    kind: str, ranks: int, before: Degrees, line: Callable[[Degrees], Sequence[str]], candidates: Iterable[Degrees]
) -> Iterator[Degrees]:
    """Yield the candidates that the rules accept, nearest first. line: Returns the command line of a layout."""
    ordered = sorted(candidates, key=lambda degrees: (distance(before, degrees, _WEIGHTS), sorted(degrees.items())))
    for degrees in ordered[:MOST_TRIED]:
        try:
            parse(kind, line(degrees), _environ(ranks), planning=True)
        except ConfigError:
            continue
        yield degrees


def _environ(ranks: int) -> dict[str, str]:
    """Return the environment of this job on another number of ranks."""
    return {"WORLD_SIZE": str(ranks), ROUND: str(starts_before(os.environ))}


def _layouts(ranks: int, choices: Mapping[str, Sequence[int]]) -> Iterator[Degrees]:
    """Yield all layouts of ``ranks`` ranks. choices: Allowed degrees by axis, by default all; for ep only 1."""
    split = {axis: choices.get(axis, divisors(ranks)) for axis in ("mp", "pp", "cp", "sharding")}
    for degrees in layouts(ranks, split):
        for ep in choices.get("ep", (1,)):
            yield {**degrees, "ep": ep, "dp": ranks // math.prod(degrees.values())}


def _layout_flags(degrees: Degrees, requested: Config) -> list[str]:
    training = requested.training
    step = training.micro_batch_size * degrees["dp"] * degrees["sharding"]
    line = [part for axis in FLAGGED for part in (f"--{axis}-degree", str(degrees[axis]))]
    line += ["--hybrid-dp" if degrees["dp"] > 1 else "--no-hybrid-dp", "--dp-degree", str(degrees["dp"])]
    # The last of repeated flags wins. Set both of these, because the command line may contain either.
    line += ["--global-batch-size", str(training.global_batch_size)]
    return [*line, "--gradient-merge-acc-step", str(max(1, training.global_batch_size // step))]
