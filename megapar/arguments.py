"""Command-line parsing: turn a command line, YAML files and the environment into a frozen Config.

If anything is wrong, all complaints are reported at once. Uses only the standard library (and PyYAML with --config), so
that a configuration is refused before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from megapar.compatibility import RULES, check
from megapar.config.config import FLAGS, GROUPS, NOT_BUILT_NOTE, Config, build
from megapar.config.draft import Draft, is_from_file, is_given, unknown_to_trainers
from megapar.config.files import apply_chat_date, apply_stored_tokenizer, check_files, check_model
from megapar.config.published import apply_published
from megapar.config.read import (
    drop_replaced_data,
    fill_defaults,
    read_files,
    read_line,
    read_mapping,
    refuse_foreign,
    warn_of_sharded_parameters,
)
from megapar.config.report import effective, help_text, refusal, remarks
from megapar.config.resolve import resolve
from megapar.config.start import check_defaults, check_rank, check_save, check_start
from megapar.config.values import BadValue, convert, remote_paths
from megapar.config.vocab_size import assumed_rows, derived_rows
from megapar.core.grid import Grid
from megapar.errors import Complaint, ConfigError
from megapar.files.uri import is_stored
from megapar.launch_environment import equal_nodes, starts_before
from megapar.rules.model import export_class
from megapar.schema.flag import KINDS, SCRIPTS, Flag, normal
from megapar.schema.rule import NO_EFFECT, either, show, spell

__all__ = ["FLAGS", "GROUPS", "KINDS", "SCRIPTS", "Config", "Flag", "parse", "parse_or_exit", "resolved_values"]


Line = Sequence[str] | Mapping[str, Any]
"""A command line without the program name; or settings by the names of flags, as in a YAML file."""


def parse(
    kind: str, argv: Line, environ: Mapping[str, str] | None = None, *, starting: bool = False, planning: bool = False
) -> Config:
    """Return the complete configuration for a command line and an environment.

    With --rules-only, files are read only for the sizes of the model, and features of a later version become notes.
    Raises ConfigError with all complaints if the configuration is refused.

    Args:
        argv: The command line without the program name; or settings by the names of flags, as ``{"lr": 1e-3}``.
        environ: The environment, by default that of this process. WORLD_SIZE is the number of ranks, 1 if it is not
            set; --world-size overrides it with --validate-only and --rules-only.
        starting: This process is a rank of the run, so also check that it has what a rank needs (unless --validate-only
            is set).
        planning: No run starts. Skip the checks that only a start needs; the planner handles ``assume`` itself. The
            folder of --load-hf must exist, because a plan of the default sizes would be one of another model.
    """
    if kind not in KINDS:
        fix = f"Trainers are {either(KINDS)}; a dense decoder is moe with num_experts 0."
        raise ConfigError([Complaint("trainer", f"{kind!r} is not a trainer.", fix)])
    if isinstance(argv, str):
        raise TypeError("parse takes words or a mapping, not a text: split() it, or pass {'lr': 1e-3}")
    environ = os.environ if environ is None else environ
    draft, values = _resolved(kind, argv, environ)
    if draft.foreign:  # without the file, the command line describes a different run
        raise ConfigError(draft.complaints)
    if not planning and (warning := unknown_to_trainers(draft.about.assume)):
        draft.warnings.append(warning)
    findings = check(values, strict=values.get("strict_seed_rules") is True)
    validate_only, rules_only = values.get("validate_only") is True, values.get("rules_only") is True
    if validate_only and rules_only:
        message = "--validate-only checks the files as well, and --rules-only does not."
        draft.complain("contradiction", message, "Keep one of them.")
    with _path_errors_as_complaints(draft):
        checks = check_model(values) if rules_only else check_files(values, restart=starts_before(environ) > 0)
        files = [] if values.get("remote_paths") or (rules_only and not planning) else list(checks)
    start = check_start(environ, values) if starting and not validate_only and not rules_only else []
    defaults = check_defaults(values, draft.origins)
    if (starting or validate_only) and not rules_only:
        with _path_errors_as_complaints(draft):
            stored = is_stored(values.get("save") or "")  # at which one rank looks when the run has started
            start += [] if stored else check_save(environ, values)
        start += () if planning else defaults.refused
    complaints = [*draft.complaints, *findings.refused, *([] if rules_only else findings.not_built), *files, *start]
    if complaints:
        raise ConfigError(complaints)
    values.update(findings.sets)
    draft.origins.update({name: f"switched off by {rule}" for name, rule in findings.by.items()})
    notes = tuple(f"{NOT_BUILT_NOTE}{complaint}" for complaint in findings.not_built)
    if draft.origins.get("vocab_size") == "derived" and (note := assumed_rows(values)):
        notes = (*notes, note)
    warnings = (*draft.warnings, *findings.warnings)
    reminders = tuple(str(complaint) for complaint in (*defaults.refused, *defaults.notes))
    return build(kind, values, draft.origins, warnings, notes, reminders, grid_of(values))


def resolved_values(kind: str, argv: Line, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the flat values that the rules read, unchecked; bad values are missing. For tests and tools."""
    return _resolved(kind, argv, environ)[1]


def parse_or_exit(
    kind: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    outline: Callable[[Config], str] | None = None,
    warn: bool = True,
    starting: bool | None = None,
) -> Config:
    """Call ``parse`` for a script, and exit after --help, --validate-only and --rules-only (0) or a refusal (2).

    Only rank 0 prints, or a process without RANK. What concerns one rank is said by that rank, and what concerns the
    device of a node by the first rank there.

    Args:
        argv: The command line; by default that of this process.
        environ: The environment; by default that of this process.
        outline: Returns the description of the model that --validate-only prints, or raises ConfigError if the model
            cannot be built. It must not import torch.
        starting: The run starts in this process; by default true if ``environ`` is not given.
    """
    argv = sys.argv[1:] if argv is None else argv
    starting = environ is None if starting is None else starting
    environ = os.environ if environ is None else environ
    prints = (environ.get("RANK") or "0") == "0" or (environ.get("WORLD_SIZE") or "1") == "1"
    if (topic := _help_topic(argv)) is not None:
        try:
            _print(help_text(kind, topic), prints)
        except LookupError as error:
            _print(f"megapar: {error.args[0]}\n", prints, error=True)
            raise SystemExit(2) from None
        raise SystemExit(0)
    try:
        config = parse(kind, argv, environ, starting=starting)
        more = outline(config) if outline is not None else ""
    except ConfigError as error:
        _print(refusal(error.complaints), prints or _concerns_one(error, environ), error=True)
        raise SystemExit(ConfigError.exit_status) from None
    if config.runtime.validate_only or config.runtime.rules_only:
        _print(effective(config) + more + remarks(config), prints)
        raise SystemExit(0)
    messages = [*(f"warning: {text}" for text in config.warnings), *(f"note: {text}" for text in config.reminders)]
    with suppress(OSError):  # a full disk under the log must not end the run
        _print("".join(f"megapar: {text}\n" for text in messages), prints and warn, error=True)
    return config


def _help_topic(argv: Sequence[str]) -> str | None:
    """Return what --help is asked about, "" for everything in brief; None without --help."""
    for at, token in enumerate(argv):
        name, _, attached = token.partition("=")
        if name in ("-h", "--help"):
            after = argv[at + 1 : at + 2]
            asked = [word.partition("=")[0] for word in after if not word.startswith("-") or at + 2 == len(argv)]
            return attached or "".join(asked)
    return None


def _concerns_one(error: ConfigError, environ: Mapping[str, str]) -> bool:
    on_node = environ.get("LOCAL_RANK") == "0" and any(complaint.rule == "device" for complaint in error.complaints)
    return on_node or bool(check_rank(environ))


def _print(text: str, prints: bool, error: bool = False) -> None:
    stream = sys.stderr if error else sys.stdout
    if prints and text:
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:  # the reader (head, less) has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _resolved(kind: str, argv: Line, environ: Mapping[str, str]) -> tuple[Draft, dict[str, Any]]:
    """Read files and command line, fill in and derive the rest; return the draft and flat values for the rules."""
    draft = Draft(kind, environ)
    with _path_errors_as_complaints(draft):
        return draft, flat_values(draft, read_settings(draft, argv))


@contextmanager
def _path_errors_as_complaints(draft: Draft) -> Iterator[None]:
    """Turn an OSError about a path (no permission, name too long) into one more complaint, and raise ConfigError."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename}: {error.strerror}." if error.filename else f"{error}."
        raise ConfigError([*draft.complaints, Complaint("file", message)]) from error


def read_settings(draft: Draft, argv: Line) -> str | None:
    """Merge all sources of settings into the draft; return the class of a published model, if there is one.

    The order: files, of which a later one overrides the earlier; the command line, which overrides them; the default of
    every flag that neither sets. Only values that are still defaults are then replaced, by the tokenizer that is stored
    with the weights and by what the ``config.json`` of a published model determines (a set flag that contradicts it is
    a complaint).
    """
    if isinstance(argv, Mapping):
        read_files(draft, _as_list(argv.get("config")))
        read_mapping(draft, argv)
    else:
        read_files(draft, _config_paths(argv))
        read_line(draft, argv)
    drop_replaced_data(draft)
    warn_of_sharded_parameters(draft)
    refuse_foreign(draft)
    fill_defaults(draft)
    _drop_idle(draft)
    apply_stored_tokenizer(draft)
    apply_chat_date(draft)
    return apply_published(draft)


def _drop_idle(draft: Draft) -> None:
    """Reset what files set and a flag of the command line leaves without an effect, with a warning.

    --num-experts 0 after a file of a mixture of experts is one. What the line sets itself, or a file alone, is refused.
    """
    defaults = {name: FLAGS[name].defaults[draft.kind] for name in draft.values}
    files = [name for name, value in draft.values.items() if value != defaults[name]]
    files = [name for name in files if is_from_file(draft.origins[name])]
    for rule in RULES:
        reads = [name for name in rule.reads if name in FLAGS]
        if rule.source != NO_EFFECT or any(draft.values.get(name) is None for name in reads):  # bad, or still open
            continue
        by = [f"{spell(name)} {show(draft.values[name])}" for name in reads if draft.origins[name] == "flag"]
        if "not_default" not in rule.reads or not by:
            continue
        facts = {**draft.values, "kind": draft.kind, "given": frozenset()}
        idle = [name for name in files if rule.broken({**facts, "not_default": frozenset((name,))})]
        if idle:
            names = ", ".join(f"{spell(name)} {show(draft.values[name])}" for name in idle)
            draft.warnings.append(f"left out of --config, without an effect beside {' '.join(by)}: {names}")
            draft.values.update({name: defaults[name] for name in idle})
            draft.origins.update(dict.fromkeys(idle, "default"))


def flat_values(draft: Draft, published: str | None) -> dict[str, Any]:
    """Return the flat values that the rules read, with everything derived that is open; bad values are missing.

    The number of ranks is derived from WORLD_SIZE. The draft's origins receive those of derived values.
    ``published`` is the class of a published model.
    """
    kind, environ = draft.kind, draft.environ
    requested = dict(draft.values)
    not_default = frozenset(name for name, value in requested.items() if value != FLAGS[name].defaults[kind])
    given = frozenset(name for name, origin in draft.origins.items() if is_given(origin))
    values: dict[str, Any] = {
        **requested,
        "kind": kind,
        "requested": requested,
        "not_default": not_default,
        "given": given,
    }
    for name in ("sharding", "dp"):
        if f"{name}_degree" in requested:
            values[f"{name}_requested"] = requested[f"{name}_degree"]
    launched = _launched(draft, environ)
    if launched is not None:
        values["launched_size"] = launched
        values["launched_node"] = equal_nodes(environ)
    values["remote_paths"] = remote_paths(FLAGS, values)
    resolve(values, draft.origins)
    if "vocab_size" in requested and requested["vocab_size"] is None:
        saved = values.get("save") if starts_before(draft.environ) else None
        values["vocab_size"], draft.origins["vocab_size"] = derived_rows(values, saved).size, "derived"
    if (written := export_class(values, published)) is not None:
        values["export_class"] = written
    return values


def _as_list(value: Any) -> list[str]:
    return [] if value is None else [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def _config_paths(argv: Sequence[str]) -> list[str]:
    """Return the values of all --config flags in order; files are read before the rest of the command line."""
    paths = []
    for index, token in enumerate(argv):
        name, equals, attached = token.partition("=")
        if normal(name) != "--config":
            continue
        if equals:
            paths.append(attached)
        elif index + 1 < len(argv):
            paths.append(argv[index + 1])
    return paths


def _launched(draft: Draft, environ: Mapping[str, str]) -> int | None:
    try:
        return int(convert(FLAGS["world_size"], environ.get("WORLD_SIZE") or "1"))
    except BadValue:
        fix = "Start the ranks with megapar launch or torchrun, which set it; for a single process, unset it."
        draft.complain("environment", f"WORLD_SIZE is {environ['WORLD_SIZE']!r}, not a number of ranks.", fix)
        return None


def grid_of(values: Mapping[str, Any]) -> Grid:
    """Return the grid of ranks for complete flat values."""
    return Grid(
        dp=values["dp_degree"],
        pp=values["pp_degree"],
        sharding=values["sharding_degree"],
        cp=values["cp_degree"],
        mp=values["mp_degree"],
        ep=values["ep_degree"],
        emp=values["expert_mp_degree"],
        order=values["rank_order"],
    )
