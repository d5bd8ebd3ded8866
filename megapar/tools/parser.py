"""An argparse parser with short errors: the mistake and the nearest option, without the usage."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, with the nearest name for an unknown option.

    Attributes:
        elsewhere: What other programs' options are called here.
    """

    elsewhere: Mapping[str, str] = MappingProxyType({})

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
