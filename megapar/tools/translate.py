"""Translate a launch script of Megatron-LM, MindSpeed, Megatron-DeepSpeed or Paddle into a megapar command.

Takes an unmodified script (shell, YAML or JSON) or, after ``--``, a command line or bare arguments. Every argument is
accounted for. Differences that change the training are reported first.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from megapar.arguments import parse, resolved_values
from megapar.config.draft import Draft
from megapar.config.read import normal, read_line
from megapar.errors import Complaint, ConfigError
from megapar.schema.flag import SCRIPTS
from megapar.tools.configs import yaml_of
from megapar.tools.parser import Parser
from megapar.tools.translation import open_values
from megapar.tools.translation.cases import whole
from megapar.tools.translation.source import (
    ASSIGNED,
    JSON,
    YAML,
    Line,
    Script,
    UnreadableError,
    read_source,
    take_apart,
)
from megapar.tools.translation.table import NAMES, trainer_kind
from megapar.tools.translation.translated import (
    Translated,
    changing,
    equivalent,
    framework_of,
    guess,
    implicit_defaults,
    left_paths,
    translate,
)
from megapar.tools.translation.verdict import ANOTHER, LEFT, OTHER, UNKNOWN, VERDICTS

__all__ = ["Translated", "Translation", "equivalent", "implicit_defaults", "main", "translate", "translate_line"]

SAME_TRAINING, NOTHING, OTHER_TRAINING = 0, 2, 3
_STATUS = "Exit status: 0 the same training, 2 nothing to translate, 3 a different training or a refused command."
_USAGE = "megapar translate train.sh, megapar translate run.yaml, megapar translate -- torchrun ... pretrain_gpt.py ..."
_SHELLS = ("bash", "sh")
_SCRIPTS = (".sh", ".sbatch", ".slurm", *YAML, *JSON)
_OWN = ("--json", "--yaml", "--accept")
_GUESSES = {
    "": "{}",
    "likely": "{} (a guess from the arguments)",
    "open": "Unknown framework, read as {} (a guess from the arguments; its defaults are not added)",
}
# Rules about files on this machine. The files of the script may be elsewhere.
_ABOUT_FILES = ("file", "file-missing", "checkpoint-missing", "checkpoint", "record", "tokenizer", "package")
_MOST_RANKS = 4096
_LATER = "left-to-you"  # placeholder for a path during the check


@dataclass(frozen=True)
class Answer:
    """Result of the compatibility rules for a command.

    Attributes:
        ranks: Number of ranks that was checked.
        specified: The script specifies the number of ranks.
        complaints: Violated rules.
        files: Violated rules about paths and packages that do not exist on this machine.
        fits: A number of ranks that the rules accept, if they refuse the script's; else None.
    """

    ranks: int
    specified: bool
    complaints: tuple[Complaint, ...]
    files: tuple[Complaint, ...]
    fits: int | None = None


@dataclass(frozen=True)
class Translation:
    """The translation of one command line.

    Attributes:
        framework: Key of ``NAMES``.
        kind: Kind of megapar trainer; empty if no trainer fits the script.
        items: The translated arguments, then the framework's defaults that differ from megapar's.
        answer: Result of the compatibility rules; None if sizes are left open, since the rules would then check
            megapar's defaults instead.
    """

    line: Line
    framework: str
    kind: str
    items: tuple[Translated, ...]
    answer: Answer | None

    @property
    def starts(self) -> bool:
        """True if there is a command and no rule refuses it."""
        return bool(self.kind) and not (self.answer and self.answer.complaints)

    @property
    def same(self) -> bool:
        """True if the command starts and trains what the script trains."""
        return self.starts and not changing(self.items)


def make_parser() -> Parser:
    """Return the parser of the command's own options."""
    examples = (
        "train.sh",
        "train.sh MODEL_SIZE=8b --json",
        "-- --num-layers 4 --hidden-size 64 --num-attention-heads 4",
    )
    parser = Parser(prog="megapar translate", description=__doc__, epilog=_STATUS, examples=examples)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a list of objects, one per argument")
    form.add_argument("--yaml", action="store_true", help="print a file for --config in place of the command")
    parser.add_argument("--accept", action="store_true", help="exit with status 0 even if the training differs")
    parser.add_argument("source", nargs="*", metavar="FILE [NAME=VALUE ...]", help="a script, and variables for it")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the command and the verdict on every argument. Return the exit status (``_STATUS``)."""
    parser = make_parser()
    own, foreign = _split_arguments(argv)
    options = parser.parse_args(own)
    try:
        source = _source(options.source, foreign)
    except UnreadableError as error:
        parser.error(str(error))
    starts = (line for line in source.lines if line.entry is not None and line.entry.model)
    translation = translate_line(next(starts, source.lines[0]))
    if options.json:
        print(json.dumps([asdict(item) for item in translation.items]))
    else:
        sys.stdout.write(as_yaml(translation, source) if options.yaml else describe(translation, source))
    return SAME_TRAINING if translation.same or (options.accept and translation.starts) else OTHER_TRAINING


def _split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split at ``--`` into (options of this command and a file, a command line or the arguments of the script)."""
    words = list(argv)
    if "--" in words:
        place = words.index("--")
        return words[:place], words[place + 1 :]
    if any(word.startswith("--") and word not in (*_OWN, "--help") for word in words):
        own = [word for word in words if word in _OWN]  # the -- was forgotten
        rest = [word for word in words if word not in own]
        if not rest[0].startswith("-") and Path(rest[0]).suffix in _SCRIPTS:
            end = next(place for place, word in enumerate(rest) if word.startswith("--"))
            return [*own, *rest[:end]], rest[end:]
        return own, rest
    return words, []


def _source(given: Sequence[str], foreign: Sequence[str]) -> Script:
    """Return the command lines to translate. Raises UnreadableError if there are none."""
    if not given and not foreign:
        raise UnreadableError(f"nothing to translate: {_USAGE}")
    if not given:
        try:
            words = shlex.split(foreign[0]) if len(foreign) == 1 and " " in foreign[0] else list(foreign)
        except ValueError as error:
            raise UnreadableError(f"the command line cannot be read: {error}") from None
        if len(words) > 1 and words[0] in _SHELLS and words[1].endswith(".sh"):
            return read_source(Path(words[1]), {}, words[2:])
        return Script((take_apart(words),))
    assigned = dict(word.split("=", 1) for word in given[1:] if ASSIGNED.match(word))
    positional = [word for word in given[1:] if not ASSIGNED.match(word)]
    return read_source(Path(given[0]), assigned, [*positional, *foreign])


def translate_line(line: Line) -> Translation:
    """Translate a line, including the framework's implicit defaults, and check the result against the rules."""
    framework = framework_of(line)
    items = translate(line.arguments, framework, line.launcher)
    kind = _kind(line, framework, items)
    if kind and guess(line, framework) != "open":
        items += implicit_defaults(items, framework)
    complete = not any(item.verdict == LEFT and (item.default or item.decides) for item in items)
    answer = check(kind, *equivalent(items), left_paths(items)) if kind and complete else None
    return Translation(line, framework, kind, tuple(items), answer)


def _kind(line: Line, framework: str, items: Sequence[Translated]) -> str:
    if line.entry is not None and not line.entry.model:
        return ""
    return trainer_kind(framework, {normal(item.flag.lstrip("-")): item.value for item in items})


def check(kind: str, launcher: Sequence[str], trainer: Sequence[str], left: Sequence[str] = ()) -> Answer:
    """Check flags against the rules, for the script's number of ranks or, if unspecified, the minimum that is accepted.

    Args:
        left: Flags of paths that are left to the user; the paths are assumed to exist.
    """
    words = [word for flags in trainer for word in shlex.split(flags)]
    words += [word for flag in left for word in (flag, _LATER)]
    ranks = _ranks(launcher)
    if ranks is None:
        return _fewest(kind, words)
    answer = _check(kind, words, ranks, True)
    if answer.complaints:
        other = _fewest(kind, words)
        return answer if other.complaints else replace(answer, fits=other.ranks)
    return answer


def _fewest(kind: str, words: Sequence[str]) -> Answer:
    """Return the answer for the minimum number of ranks that is accepted; for the layout's minimum if none is."""
    ranks = minimum = _minimum(kind, words)
    first = answer = _check(kind, words, ranks, False)
    while answer.complaints and ranks * 2 <= min(_MOST_RANKS, minimum * 64):
        ranks *= 2
        answer = _check(kind, words, ranks, False)
    return first if answer.complaints else answer


def _ranks(launcher: Sequence[str]) -> int | None:
    """Return nodes x ranks per node; None if one of them is unspecified."""
    words = [word for flags in launcher for word in flags.split()]
    values = dict(pairwise(words))
    per_node, nodes = whole(values.get("--nproc-per-node", "")), whole(values.get("--nnodes", "1").rpartition(":")[2])
    return per_node * nodes if per_node is not None and nodes is not None else None


def _minimum(kind: str, words: Sequence[str]) -> int:
    values = resolved_values(kind, words, {})
    sizes = [values.get(name) for name in ("mp_degree", "pp_degree", "cp_degree", "sharding_degree")]
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return min(product, _MOST_RANKS)


def _check(kind: str, words: Sequence[str], ranks: int, specified: bool) -> Answer:
    try:
        parse(kind, words, {"WORLD_SIZE": str(ranks)})
    except ConfigError as error:
        rules = tuple(one for one in error.complaints if one.rule not in _ABOUT_FILES)
        files = tuple(one for one in error.complaints if one.rule in _ABOUT_FILES and _LATER not in one.message)
        return Answer(ranks, specified, rules, files)
    return Answer(ranks, specified, (), ())


def describe(translation: Translation, source: Script | None = None) -> str:
    """Return the report: the source, the differences, the command, then every argument grouped by verdict."""
    lines = [f"# {text}" for text in _heading(translation, source)]
    if translation.kind:
        lines += ["", *_command(translation)]
    for verdict in VERDICTS:
        rows = [item for item in translation.items if item.verdict == verdict and not item.default]
        lines += ["", f"{verdict} ({len(rows)})", *map(_row, rows)] if rows else []
    added = [item for item in translation.items if item.default]
    lines += ["", f"not set by the script ({len(added)})", *map(_added, added)] if added else []
    answer = translation.answer
    if answer is not None and answer.complaints:
        lines += ["", f"refused here ({len(answer.complaints)})", *(f"  {one}" for one in answer.complaints)]
    if answer is not None and answer.files:
        lines += ["", f"not on this machine ({len(answer.files)})", *(f"  {one}" for one in answer.files)]
    return "\n".join(lines) + "\n"


def as_yaml(translation: Translation, source: Script | None = None) -> str:
    """Return the heading as comments, how to start the file, and the trainer's flags as a file for --config.

    What changes the training, is left to the user or refused is a comment each, of one line whatever values contain.
    """
    notes, settings = _heading(translation, source), ""
    if translation.kind:
        launcher, trainer = equivalent(translation.items)
        script = SCRIPTS[translation.kind]
        draft = Draft(translation.kind)
        read_line(draft, [word for flags in trainer for word in shlex.split(flags)])
        notes.append(f"Start it by: {' '.join(['megapar launch', *launcher, script])} --config FILE")
        noted = [item for item in translation.items if item.verdict == LEFT or item in changing(translation.items)]
        notes += [f"{_named(item)}: {item.reason}" for item in noted]
        notes += map(str, translation.answer.complaints if translation.answer else draft.complaints)
        settings = f"script: {script}\n{yaml_of(draft.values)}"
    return "".join(f"# {' '.join(note.split())}\n" for note in notes) + settings


def _heading(translation: Translation, source: Script | None) -> list[str]:
    line, entry = translation.line, translation.line.entry
    by = f", started by {open_values.as_written(' and '.join(line.starters))}" if line.starters else ""
    what = f"{Path(open_values.as_written(line.script)).name}" if line.script else "arguments"
    framework = _GUESSES[guess(line, translation.framework)].format(NAMES[translation.framework])
    lines = [f"{framework}: {what}{by}{f' in line {line.at}' if line.at else ''}"]
    if not translation.kind:
        lines.append(f"NOT TRANSLATED: {what} is for {entry.what if entry else 'another architecture'}.")
    elif translation.same:
        lines.append("The same training, except for random numbers (docs/translate.md)")
    else:
        lines += _differences(translation)
    open_ones = [item.here or item.flag for item in translation.items if item.verdict == LEFT and not item.decides]
    lines += [f"Left to you: {' '.join(dict.fromkeys(open_ones))}"] if open_ones and translation.kind else []
    if translation.kind and translation.answer is None:
        lines.append("Not checked against the rules of the trainers, because sizes are left to you")
    lines += source.remarks if source else ()
    others = [one for one in source.lines if one is not line] if source else []
    names = [Path(open_values.as_written(one.script)).name for one in others]
    return lines + [
        f"line {one.at} also starts {name}: not translated" for one, name in zip(others, names, strict=True)
    ]


def _differences(translation: Translation) -> list[str]:
    lines = []
    changed = changing(translation.items)
    heads = {ANOTHER: "ANOTHER MODEL", OTHER: "DIFFERENT RESULTS", UNKNOWN: "UNKNOWN", LEFT: "LEFT TO YOU"}
    for verdict, head in heads.items():
        names = list(dict.fromkeys(_named(item) for item in changed if item.verdict == verdict))
        if names:
            lines.append(f"{head}: {' '.join(names)}")
    answer = translation.answer
    if answer is not None and answer.complaints:
        source = "as in the script" if answer.specified else "the minimum for its layout"
        other = f"; {answer.fits} ranks would be accepted" if answer.fits else ""
        ranks = "1 rank" if answer.ranks == 1 else f"{answer.ranks} ranks"
        lines.append(f"REFUSED here for {ranks} ({source}){other}: see the last section")
    return lines


def _named(item: Translated) -> str:
    return f"{item.flag} (not set)" if item.default else item.here or item.flag or item.value


def _command(translation: Translation) -> list[str]:
    launcher, trainer = equivalent(translation.items)
    lines = ["megapar launch " + " ".join([*launcher, SCRIPTS[translation.kind]]) + " \\"]
    lines += [f"    {flags} \\" for flags in trainer]  # no comments: the command is meant to be pasted
    lines[-1] = lines[-1].removesuffix(" \\")
    return lines


def _row(item: Translated) -> str:
    written = f"{item.flag} {item.value}".strip()
    arrow = f" -> {item.ours}" if item.ours and item.ours != written else ""
    arrow = f" -> {item.here}" if item.here not in ("", item.flag) else arrow
    return f"  {written}{arrow}" + (f": {item.reason}" if item.reason else "")


def _added(item: Translated) -> str:
    added = item.ours or f"{item.verdict}: {item.flag}"
    return f"  {added}" + (f": {item.reason}" if item.reason else "")
