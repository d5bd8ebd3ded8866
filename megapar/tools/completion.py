"""``megapar completion``: prints what completes commands, flags, values and names of configurations in a shell.

The package argcomplete does the work: the shell runs ``megapar`` with the line so far in the environment, and gets the
words that may follow. Each command's own parser says which, and is the only one that is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from megapar.schema.flag import KINDS, SCRIPTS
from megapar.tools.parser import Parser

VARIABLE = "_ARGCOMPLETE"
"""Variable that argcomplete sets when it wants completions: number of the word of the line that is ``megapar``."""

SHELLS = ("bash", "zsh", "fish")
TAKES_FLAGS = ("plan", "evaluate")  # commands that also take the flags of the trainers
MISSING = "completion needs the package argcomplete: pip install argcomplete, or megapar[completion]"


class Completed(NamedTuple):
    """The parser that completes a line.

    Attributes:
        at: Number of the word that stands for the program; the words after it are the parser's arguments.
    """

    parser: argparse.ArgumentParser
    at: int


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="megapar completion",
        description="Print what completes megapar's commands and flags. For bash and zsh, put this line into ~/.bashrc "
        'or ~/.zshrc: eval "$(megapar completion bash)". For fish: megapar completion fish > '
        "~/.config/fish/completions/megapar.fish",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the code for a shell. Return 0, or 1 without argcomplete."""
    shell = make_parser().parse_args(argv).shell
    try:
        import argcomplete
    except ImportError:
        print(f"megapar completion: {MISSING}", file=sys.stderr)
        return 1
    print(argcomplete.shellcode(["megapar"], shell=shell))
    return 0


def complete(commands: Mapping[str, tuple[str, str]]) -> None:
    """Answer the shell, and exit. ``commands``: every command with its module and its description."""
    try:
        import argcomplete
        from argcomplete.lexers import split_line
    except ImportError:
        raise SystemExit(1) from None
    first = int(os.environ[VARIABLE])
    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3][first - 1 :]
    found = parser_of(words, commands)
    os.environ[VARIABLE] = str(first + found.at)
    argcomplete.autocomplete(found.parser, always_complete_options="long")


def parser_of(words: Sequence[str], commands: Mapping[str, tuple[str, str]]) -> Completed:
    """Return the parser of the word that follows ``words``, the first of which is ``megapar``."""
    command = words[1] if len(words) > 1 else ""
    if command == "pretrain":
        return _pretrain(words, 1)
    if command == "launch":
        scripts = {script: kind for kind, script in SCRIPTS.items()}
        for at, word in enumerate(words[2:], 2):
            if word == "pretrain":
                return _pretrain(words, at)
            if word in scripts:
                return Completed(flag_parser([scripts[word]]), at)
            if word == "evaluate":
                return Completed(_parser(word, word), at)
    if command in commands:
        return Completed(_parser(command, commands[command][0]), 1)
    parser = argparse.ArgumentParser(prog="megapar")
    names = parser.add_subparsers()
    for name, (_, text) in commands.items():
        names.add_parser(name, help=text)
    return Completed(parser, 0)


def _pretrain(words: Sequence[str], at: int) -> Completed:
    """Return the parser after the word ``pretrain``: of the models' names, or of the flags of one."""
    if len(words) > at + 1 and words[at + 1] in KINDS:
        return Completed(flag_parser([words[at + 1]]), at + 1)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model", choices=KINDS)
    return Completed(parser, at)


def _parser(command: str, module: str) -> argparse.ArgumentParser:
    """Return the parser of a command, by ``make_parser`` of its module, without importing more than that needs."""
    module = "launcher.launch_options" if command == "launch" else module
    parser: argparse.ArgumentParser = resolve_name(f"megapar.tools.{module}:make_parser")()
    return flag_parser(KINDS, parser) if command in TAKES_FLAGS else parser


def flag_parser(kinds: Iterable[str], parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Return ``parser``, or a new one, with the flags of these trainers that it lacks, only for completion."""
    from megapar.config.config import FLAGS

    parser = argparse.ArgumentParser(allow_abbrev=False) if parser is None else parser
    for flag in FLAGS.values():
        if not set(kinds) & set(flag.models):
            continue
        spellings = [flag.spelling]
        if not flag.takes_value:
            spellings += [flag.negation] if not flag.spelling.startswith("--no-") else []
        spellings = [name for name in spellings if name not in parser._option_string_actions]
        if spellings:
            _complete_values(parser.add_argument(*spellings, **_options(flag)), flag)
    config = parser._option_string_actions.get("--config")
    if config is not None:
        config.completer = _configurations  # type: ignore[attr-defined]
    return parser


def _options(flag: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a flag."""
    options: dict[str, Any] = {"help": flag.help.replace("%", "%%"), "dest": flag.name}
    if flag.type == "bool":
        return {**options, "action": "store_true"}
    if flag.choices:
        options["choices"] = [str(choice) for choice in flag.choices]
    if flag.takes_list or flag.type == "switch":
        options["nargs"] = "*" if flag.takes_list else "?"
    return options


def _complete_values(action: argparse.Action, flag: Any) -> None:
    """Complete the values of paths by files, and numbers by nothing."""
    if not flag.path and not flag.choices and flag.takes_value:
        action.completer = lambda **_: []  # type: ignore[attr-defined]


def _configurations(prefix: str = "", **_: Any) -> Iterator[str]:
    """Yield the names of the package's configurations, and files and folders."""
    from megapar.config.yaml_file import preset_names

    yield from preset_names()
    folder, slash, start = prefix.rpartition("/")
    place = Path(folder or slash or ".")
    for path in sorted(place.glob(f"{escape(start)}*")) if place.is_dir() else ():
        if path.is_dir() or path.suffix in (".yaml", ".yml"):
            yield f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}"
