"""The command line's only door: a line, a YAML file and the environment to a frozen Config, or every complaint at once.

Standard library only (PyYAML with --config), so that a refused configuration answers before torch could be imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from megapar.compatibility import check
from megapar.config.about import unknown_to_trainers
from megapar.config.config import FLAGS, GROUPS, Config, build
from megapar.config.draft import Draft, is_given
from megapar.config.files import check_files
from megapar.config.from_hf import take_published
from megapar.config.help import help_text
from megapar.config.kept import take_kept
from megapar.config.read import (
    let_mock_data_win,
    read_files,
    read_line,
    refuse_foreign,
    take_defaults,
    tell_what_is_sharded,
)
from megapar.config.report import effective, refusal, remarks
from megapar.config.resolve import resolve
from megapar.config.start import check_save, check_start
from megapar.config.unsaid import check_unsaid
from megapar.config.values import BadValue, convert
from megapar.config.vocab_size import assumed_rows, derived_rows
from megapar.core.grid import Grid
from megapar.errors import Complaint, ConfigError
from megapar.rules.exports import export_class
from megapar.schema.flag import KINDS, SCRIPTS, Flag, normal

__all__ = ["FLAGS", "GROUPS", "KINDS", "SCRIPTS", "Config", "Flag", "parse", "parse_or_exit", "resolved_values"]


def parse(
    kind: str, argv: Sequence[str], environ: Mapping[str, str], *, starting: bool = False, planning: bool = False
) -> Config:
    """The complete configuration of ``kind`` (moe or ernie) for this line and environment.

    environ: WORLD_SIZE is the number of ranks (1 without it; --world-size wins under --validate-only and --rules-only).
    starting: this process is one of them, and must have what a rank needs, unless --validate-only asks before.
    planning: nothing is to start, and what a file assumes is taken by somebody else. Raises ConfigError with every
    complaint. Under --rules-only files are read only for sizes of the model, and features of a
    later version become notes.
    """
    draft, values = _resolved(kind, argv, environ)
    if draft.foreign:  # without its file the line is another run
        raise ConfigError(draft.complaints)
    if not planning:
        _look_at_assumptions(draft)
    verdict = check(values, strict=values.get("strict_seed_rules") is True)
    asking, by_rules = values.get("validate_only") is True, values.get("rules_only") is True
    if asking and by_rules:
        what = "--validate-only looks at the files, too, which --rules-only leaves out."
        draft.complain("contradiction", what, "Keep one of them.")
    with _reaching(draft):
        files = [] if by_rules else list(check_files(values))
    start = check_start(environ, values) if starting and not asking and not by_rules else []
    unsaid = check_unsaid(values, draft.origins)
    if (starting or asking) and not by_rules:
        with _reaching(draft):
            start += check_save(environ, values)
        start += () if planning else unsaid.refused
    complaints = [*draft.complaints, *verdict.refused, *([] if by_rules else verdict.not_built), *files, *start]
    if complaints:
        raise ConfigError(complaints)
    values.update(verdict.sets)
    draft.origins.update({name: f"switched off by {rule}" for name, rule in verdict.by.items()})
    notes = tuple(f"NOT BUILT, a start is refused: {complaint}" for complaint in verdict.not_built)
    if draft.origins.get("vocab_size") == "derived" and (note := assumed_rows(values)):
        notes = (*notes, note)
    warnings = (*draft.warnings, *verdict.warnings)
    reminders = tuple(str(one) for one in (*unsaid.refused, *unsaid.notes))
    return build(kind, values, draft.origins, warnings, notes, reminders, _grid(values))


def _look_at_assumptions(draft: Draft) -> None:
    complaint, warning = unknown_to_trainers(draft.about.assume)
    draft.complaints += [complaint] if complaint else []
    draft.warnings += [warning] if warning else []


def resolved_values(kind: str, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Flat values as the rules see them (bad ones are missing); nothing is checked. For tests and tools."""
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
    """``parse`` for a script: answers --help, --validate-only and --rules-only (status 0) and refusals (2) by an end.

    Only rank 0, or a process without RANK, prints; warnings only with ``warn``. outline: what is to be said (or
    refused, by ConfigError) of the model that the configuration makes; it imports no torch either. starting: the run
    starts here and now; by default where environ is this process's own.
    """
    argv = sys.argv[1:] if argv is None else argv
    starting = environ is None if starting is None else starting
    environ = os.environ if environ is None else environ
    speaks = environ.get("RANK", "0") == "0" or environ.get("WORLD_SIZE", "1") == "1"
    if any(token in ("-h", "--help") for token in argv):
        _say(help_text(kind), speaks)
        raise SystemExit(0)
    try:
        config = parse(kind, argv, environ, starting=starting)
        more = outline(config) if outline is not None else ""
    except ConfigError as error:
        _say(refusal(error.complaints), speaks, error=True)
        raise SystemExit(ConfigError.exit_status) from None
    if config.runtime.validate_only or config.runtime.rules_only:
        _say(effective(config) + more + remarks(config), speaks)
        raise SystemExit(0)
    said = [*(f"warning: {text}" for text in config.warnings), *(f"note: {text}" for text in config.reminders)]
    with suppress(OSError):  # a log on a full disk ends no run that goes on
        _say("".join(f"megapar: {text}\n" for text in said), speaks and warn, error=True)
    return config


def _say(text: str, speaks: bool, error: bool = False) -> None:
    stream = sys.stderr if error else sys.stdout
    if speaks and text:
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:  # the reader (head, less) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _resolved(kind: str, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Draft, dict[str, Any]]:
    """Read file and line, fill in defaults, derive: the draft with its complaints, and flat values for the rules."""
    draft = Draft(kind, environ)
    with _reaching(draft):
        return draft, _values(draft, argv)


@contextmanager
def _reaching(draft: Draft) -> Iterator[None]:
    """What the system refuses of a path, a closed folder or a name that is too long, is one more complaint."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename}: {error.strerror}." if error.filename else f"{error}."
        raise ConfigError([*draft.complaints, Complaint("file", message)]) from error


def _values(draft: Draft, argv: Sequence[str]) -> dict[str, Any]:
    kind, environ = draft.kind, draft.environ
    read_files(draft, _config_paths(argv))
    read_line(draft, argv)
    let_mock_data_win(draft)
    tell_what_is_sharded(draft)
    refuse_foreign(draft)
    take_defaults(draft)
    take_kept(draft)
    published = take_published(draft)
    asked = dict(draft.values)
    changed = frozenset(name for name, value in asked.items() if value != FLAGS[name].defaults[kind])
    given = frozenset(name for name, origin in draft.origins.items() if is_given(origin))
    values: dict[str, Any] = {**asked, "kind": kind, "asked": asked, "changed": changed, "given": given}
    for name in ("sharding", "dp"):
        if f"{name}_degree" in asked:
            values[f"{name}_asked"] = asked[f"{name}_degree"]
    launched = _launched(draft, environ)
    if launched is not None:
        values["launched_size"] = launched
    resolve(values, draft.origins)
    if "vocab_size" in asked and asked["vocab_size"] is None:
        values["vocab_size"], draft.origins["vocab_size"] = derived_rows(values).size, "derived"
    if (written := export_class(values, published)) is not None:
        values["export_class"] = written
    return values


def _config_paths(argv: Sequence[str]) -> list[str]:
    """The values of --config, wherever they stand: files are read before the line, in their order."""
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
        return int(convert(FLAGS["world_size"], environ.get("WORLD_SIZE", "1")))
    except BadValue:
        draft.complain("environment", f"WORLD_SIZE is {environ['WORLD_SIZE']!r}, not a number of ranks.")
        return None


def _grid(values: Mapping[str, Any]) -> Grid:
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
