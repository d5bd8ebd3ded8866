"""An argparse parser with short errors: the mistake and the nearest option, without the usage.

Abbreviations are off: a prefix of one option may be a trainer's option, or become ambiguous in a later version.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn

from megapar.errors import MegaparError, input_status


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, with the nearest name for an unknown option.

    Args:
        examples: Command lines without the program name, with which --help begins.
        elsewhere: Other programs' names for options -> our names, to suggest.
    """

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), elsewhere: Mapping[str, str] = MappingProxyType({}), **more: Any
    ) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **more})
        self.examples, self.elsewhere = tuple(examples), elsewhere

    def format_help(self) -> str:
        """Return the help, with the examples first."""
        lines = [f"  {self.prog} {example}\n" for example in self.examples]
        return "".join(["examples:\n", *lines, "\n"] if lines else []) + super().format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        near = [name for word in unknown for name in self._near(word.partition("=")[0])]
        hint = f" Did you mean {' '.join(near)}?" if near else ""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end}{hint} See {self.prog} --help.\n")

    def _near(self, word: str) -> list[str]:
        if not word.startswith("-"):
            return []
        if word in self.elsewhere:
            return [self.elsewhere[word]]
        groups = (action.choices.values() for action in self._actions if isinstance(action, argparse._SubParsersAction))
        parsers = [self, *(parser for group in groups for parser in group)]
        known = sorted({name for parser in parsers for name in parser._option_string_actions if name.startswith("--")})
        longer = [name for name in known if name.startswith(word)][:1]
        return longer or get_close_matches(word, known, 1, 0.6)


def failed(command: str, error: MegaparError | OSError) -> int:
    """Print the error that ended a command, and return its exit status: 2 for wrong arguments or inputs, else 1."""
    print(f"megapar {command}: {error}", file=sys.stderr)
    return input_status(error)


def count(text: str) -> int:
    """Parse a whole number >= 1. Raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def whole(text: str) -> int:
    """Parse a whole number >= 0. Raises ArgumentTypeError for anything else."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def seconds(text: str) -> float:
    """Parse a finite number of seconds >= 0. Raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")
    return value
