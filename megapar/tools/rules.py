"""``megapar rules``: prints the compatibility matrix as text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches

from megapar.compatibility import ADVICE, DOWNGRADE, LIFTED, NOT_BUILT, REFUSE, RULES, SETTLED, Rule
from megapar.schema.flag import SCRIPTS
from megapar.schema.rule import either
from megapar.tools.parser import Parser

KIND_TITLES = {
    REFUSE: "Refused: the run does not start (exit status 2).",
    DOWNGRADE: "Switched off with a warning: the run starts without the feature.",
    ADVICE: "Advice: the run starts as requested, with a warning.",
    LIFTED: "Lifted: a rule of a source that megapar does not need; --strict-seed-rules turns it on again.",
    NOT_BUILT: "Not built yet: the run is refused; with --rules-only, a note that does not change the status.",
    SETTLED: "Settled: if one of these is violated, --ampipe-degree auto chooses 1 without measuring.",
}

NO_FLAG = "omitting the flag"


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(prog="megapar rules", description="Print the compatibility matrix.")
    parser.add_argument("--kind", choices=tuple(KIND_TITLES), help="only rows of one kind")
    parser.add_argument("row", nargs="*", metavar="[show] ROW", help="only these rows, named as in a refusal")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the matrix, or single rows of it. Return 0, or 2 if a row does not exist."""
    options = make_parser().parse_args(argv)
    kind, names = options.kind, [name.strip("[]") for name in options.row if name != "show"]
    if names or options.row:
        return _show(names)
    for title in [kind] if kind else KIND_TITLES:
        print(KIND_TITLES[title])
        for rule in RULES:
            if rule.kind == title:
                print(_paragraph(rule))
        print()
    return 0


def _show(names: Sequence[str]) -> int:
    """Print rows with their examples. Names in other refusals (checks of single values and files) are not rows."""
    known = {rule.id: rule for rule in RULES}
    status = 0
    for name in names or [""]:
        if name in known:
            rule = known[name]
            print(f"{_paragraph(rule)}\n      {KIND_TITLES[rule.kind]}\n      Satisfied by: {rule.passing or NO_FLAG}")
            continue
        near = get_close_matches(name, known, 3, 0.5) if name else []
        hint = (
            f"Did you mean {either(near)}?"
            if near
            else "megapar rules lists all rows; a check of one value or file says all."
        )
        what = f"{name} is not a row" if name else "show needs the name of a row"
        print(f"megapar rules: {what}. {hint}", file=sys.stderr)
        status = 2
    return status


def _paragraph(rule: Rule) -> str:
    reason = f" Lifted: {rule.reason}." if rule.reason else ""
    text = f"{rule.message}. [{rule.source}]{scope(rule)}{reason} Violated by: {rule.failing}"
    body = textwrap.wrap(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return "\n".join([f"  {rule.id}", *body])


def scope(rule: Rule) -> str:
    """Return the script to which a row is limited, in parentheses; "" for a row of all scripts."""
    return f" ({SCRIPTS[rule.models[0]]} only)" if len(rule.models) == 1 else ""
