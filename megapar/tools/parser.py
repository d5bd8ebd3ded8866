"""argparse with short answers: what is wrong and what is near it, not the whole usage."""

from __future__ import annotations

import argparse
import math
from difflib import get_close_matches
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, with the near name of an option that is not known."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        near = [name for word in unknown for name in self._near(word.partition("=")[0])]
        hint = f" Did you mean {' '.join(near)}?" if near else ""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{end}{hint} See {self.prog} --help.\n")

    def _near(self, word: str) -> list[str]:
        if not word.startswith("-"):
            return []
        below = (action.choices.values() for action in self._actions if isinstance(action, argparse._SubParsersAction))
        parsers = [self, *(parser for parsers in below for parser in parsers)]
        known = sorted({name for parser in parsers for name in parser._option_string_actions if name.startswith("--")})
        longer = [name for name in known if name.startswith(word)][:1]
        return longer or get_close_matches(word, known, 1, 0.6)


def count(text: str) -> int:
    """A whole number from 1 on, as argparse wants it said."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on, as argparse wants it said."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def seconds(text: str) -> float:
    """A time from 0 on, as argparse wants it said."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 on")
    return value
