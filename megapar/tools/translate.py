"""``megapar translate``: what a script of Megatron-LM, MindSpeed, Megatron-DeepSpeed or Paddle says, in our flags.

Takes a script as it lies in its repository (shell, YAML or JSON), or behind ``--`` a line or bare arguments. Every
argument is accounted for, and what makes the run here another training is said first.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megapar.config.read import normal
from megapar.schema.flag import SCRIPTS
from megapar.tools.parser import Parser
from megapar.tools.translation import open_values
from megapar.tools.translation.accepted import Answer, ask
from megapar.tools.translation.line import Line, take_apart
from megapar.tools.translation.source import Script, UnreadableError, read_source
from megapar.tools.translation.table import NAMES, model_of
from megapar.tools.translation.translated import (
    Translated,
    changing,
    equivalent,
    framework_of,
    left_paths,
    meant,
    translate,
)
from megapar.tools.translation.verdict import ANOTHER, LEFT, OTHER, UNKNOWN, VERDICTS

__all__ = ["Translated", "Translation", "equivalent", "main", "meant", "translate", "translate_line"]

SAME_TRAINING, NOTHING, OTHER_TRAINING = 0, 2, 3
_STATUS = "Exit status: 0 the same training, 2 nothing to translate, 3 another training or one that is refused."
_USAGE = "megapar translate train.sh, megapar translate run.yaml, megapar translate -- torchrun ... pretrain_gpt.py ..."
_SHELLS = ("bash", "sh")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Translation:
    """A line with all that becomes of it. kind: our trainer's; empty where none is for the script.

    answer: the rules' one; None where sizes are left open, of which rules would speak as of the defaults here.
    """

    line: Line
    framework: str
    kind: str
    found: tuple[Translated, ...]
    answer: Answer | None

    @property
    def starts(self) -> bool:
        """There is a command, and no rule refuses it."""
        return bool(self.kind) and not (self.answer and self.answer.complaints)

    @property
    def same(self) -> bool:
        """The command starts, and trains what the script trains."""
        return self.starts and not changing(self.found)


def main(argv: Sequence[str]) -> int:
    """Print the command and what became of every argument; see ``_STATUS``."""
    parser = Parser(prog="megapar translate", description=__doc__, epilog=_STATUS)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--accept", action="store_true", help="status 0 although the training is another one")
    parser.add_argument("source", nargs="*", metavar="FILE [NAME=VALUE ...]", help="a script, and variables for it")
    own, behind = _cut(argv)
    asked = parser.parse_args(own)
    try:
        source = _source(asked.source, behind)
    except UnreadableError as error:
        parser.error(str(error))
    translation = translate_line(_chosen(source))
    if asked.json:
        print(json.dumps([asdict(item) for item in translation.found]))
    else:
        sys.stdout.write(describe(translation, source))
    return SAME_TRAINING if translation.same or (asked.accept and translation.starts) else OTHER_TRAINING


def _cut(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own options and a file in front of ``--``; a line, or a script's arguments, behind it."""
    words = list(argv)
    if "--" in words:
        place = words.index("--")
        return words[:place], words[place + 1 :]
    if any(word.startswith("--") and word not in ("--json", "--accept", "--help") for word in words):
        own = [word for word in words if word in ("--json", "--accept")]  # somebody forgot the --
        return own, [word for word in words if word not in own]
    return words, []


def _source(given: Sequence[str], behind: Sequence[str]) -> Script:
    """The lines to translate. Raises UnreadableError."""
    if not given and not behind:
        raise UnreadableError(f"nothing to translate: {_USAGE}")
    if not given:
        words = shlex.split(behind[0]) if len(behind) == 1 and " " in behind[0] else list(behind)
        if len(words) > 1 and words[0] in _SHELLS and words[1].endswith(".sh"):
            return read_source(Path(words[1]), {}, words[2:])
        return Script((take_apart(words),))
    assigned = dict(word.split("=", 1) for word in given[1:] if _ASSIGNED.match(word))
    positional = [word for word in given[1:] if not _ASSIGNED.match(word)]
    return read_source(Path(given[0]), assigned, [*positional, *behind])


def _chosen(source: Script) -> Line:
    """The first line that starts pre-training; the first one where none does."""
    return next((line for line in source.lines if line.entry is not None and line.entry.model), source.lines[0])


def translate_line(line: Line) -> Translation:
    """What becomes of a line, with what is meant but not said, and the rules' answer."""
    framework = framework_of(line)
    found = translate(line.arguments, framework, line.launcher)
    kind = _kind(line, framework, found)
    found += meant(found, framework)
    complete = not any(item.verdict == LEFT and (item.default or item.decides) for item in found)
    answer = ask(kind, *equivalent(found), left_paths(found)) if kind and complete else None
    return Translation(line, framework, kind, tuple(found), answer)


def _kind(line: Line, framework: str, found: Sequence[Translated]) -> str:
    if line.entry is not None and not line.entry.model:
        return ""
    return model_of(framework, {normal(item.flag.lstrip("-")): item.value for item in found})


def describe(translation: Translation, source: Script | None = None) -> str:
    """What is translated, what it changes, the command, then every argument by verdict."""
    lines = [f"# {text}" for text in _heading(translation, source)]
    if translation.kind:
        lines += ["", *_command(translation)]
    for verdict in VERDICTS:
        rows = [item for item in translation.found if item.verdict == verdict and not item.default]
        lines += ["", f"{verdict} ({len(rows)})", *map(_row, rows)] if rows else []
    added = [item for item in translation.found if item.default]
    lines += ["", f"not said by the script ({len(added)})", *map(_added, added)] if added else []
    answer = translation.answer
    if answer is not None and answer.complaints:
        lines += ["", f"refused here ({len(answer.complaints)})", *(f"  {one}" for one in answer.complaints)]
    if answer is not None and answer.files:
        lines += ["", f"not on this machine ({len(answer.files)})", *(f"  {one}" for one in answer.files)]
    return "\n".join(lines) + "\n"


def _heading(translation: Translation, source: Script | None) -> list[str]:
    line, entry = translation.line, translation.line.entry
    by = f", started by {' and '.join(line.starters)}" if line.starters else ""
    what = f"{Path(open_values.said(line.script)).name}" if line.script else "arguments"
    lines = [f"{NAMES[translation.framework]}: {what}{by}{f' in line {line.at}' if line.at else ''}"]
    if not translation.kind:
        lines.append(f"NOT TRANSLATED: {what} is for {entry.what if entry else 'another architecture'}.")
    elif translation.same:
        lines.append("The same training, but for random numbers (docs/translate.md)")
    else:
        lines += _differences(translation)
    open_ones = [item.flag for item in translation.found if item.verdict == LEFT and not item.decides]
    lines += [f"Left to you: {' '.join(dict.fromkeys(open_ones))}"] if open_ones and translation.kind else []
    if translation.kind and translation.answer is None:
        lines.append("The rules of the trainers were not asked, since sizes are left to you")
    lines += source.remarks if source else ()
    others = [one for one in source.lines if one is not line] if source else []
    return lines + [f"line {one.at} starts {Path(one.script).name} too: not translated" for one in others]


def _differences(translation: Translation) -> list[str]:
    lines = []
    changed = changing(translation.found)
    heads = {ANOTHER: "ANOTHER MODEL", OTHER: "OTHER NUMBERS", UNKNOWN: "UNKNOWN", LEFT: "LEFT TO YOU"}
    for verdict, head in heads.items():
        names = list(dict.fromkeys(_named(item) for item in changed if item.verdict == verdict))
        if names:
            lines.append(f"{head}: {' '.join(names)}")
    answer = translation.answer
    if answer is not None and answer.complaints:
        asked = "as the script has" if answer.said else "the fewest for its layout"
        other = f"; {answer.fits} ranks would do" if answer.fits else ""
        lines.append(f"REFUSED here for {answer.ranks} ranks ({asked}){other}: the last section says why")
    return lines


def _named(item: Translated) -> str:
    return f"{item.flag} (not said)" if item.default else item.flag or item.value


def _command(translation: Translation) -> list[str]:
    launcher, trainer = equivalent(translation.found)
    lines = ["megapar launch " + " ".join([*launcher, SCRIPTS[translation.kind]]) + " \\"]
    lines += [f"    {flags} \\" for flags in trainer]  # no comments: it is there to be pasted
    lines[-1] = lines[-1].removesuffix(" \\")
    return lines


def _row(item: Translated) -> str:
    said = f"{item.flag} {item.value}".strip()
    arrow = f" -> {item.ours}" if item.ours and item.ours != said else ""
    return f"  {said}{arrow}" + (f": {item.reason}" if item.reason else "")


def _added(item: Translated) -> str:
    said = item.ours or f"{item.verdict}: {item.flag}"
    return f"  {said}" + (f": {item.reason}" if item.reason else "")
