"""Text of --help: every flag of one trainer by group, with its unit and default."""

from __future__ import annotations

import textwrap
from typing import Any

from megapar.config.config import FLAGS, GROUPS
from megapar.schema.flag import SCRIPTS, Flag

WIDTH = 100


def signature(flag: Flag) -> str:
    """Return the flag as it is written, with a placeholder for its value."""
    if flag.type == "bool":
        return flag.spelling
    if flag.type == "switch":
        return f"{flag.spelling} [{'|'.join(flag.choices)}]"
    if flag.choices:
        return f"{flag.spelling} {{{','.join(str(choice) for choice in flag.choices)}}}"
    if flag.each:
        return f"{flag.spelling} VALUE"
    if flag.takes_list:
        return f"{flag.spelling} {'A,B,...' if flag.comma else 'VALUE ...'}"
    return f"{flag.spelling} {flag.type.upper()}"


def default_text(flag: Flag, kind: str) -> str:
    """Return the default as it is written, or the source that it is derived from."""
    value: Any = flag.defaults[kind]
    if value is None:
        return f"from {flag.derived}" if flag.derived else "none"
    return written(value, flag) + (f" ({flag.derived})" if flag.derived and not flag.name.endswith("_size") else "")


def written(value: Any, flag: Flag | None = None) -> str:
    """Return a value as it is written on a command line or in a file."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ("," if flag is not None and flag.comma else " ").join(str(item) for item in value) or "none"
    if value is None:
        return "none"
    for word, number in flag.words.items() if flag is not None else ():
        if value == number:
            return word
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe(flag: Flag, kind: str) -> str:
    """Return help, unit, default and other spellings on one line."""
    unit = f" [{flag.unit}]" if flag.unit else ""
    negates = not flag.takes_value and not flag.spelling.startswith("--no-")
    off = f"; off: --no-{flag.spelling[2:]}" if negates else ""
    also = "; also " + ", ".join("--" + alias.name for alias in flag.aliases) if flag.aliases else ""
    return f"{flag.help}{unit} (default: {default_text(flag, kind)}{off}{also})"


def help_text(kind: str) -> str:
    """Return the complete help page of one trainer."""
    lines = [
        f"usage: python {SCRIPTS[kind]} [--config NAME|FILE.yaml] [FLAGS]",
        f"       megapar launch --nproc-per-node N {SCRIPTS[kind]} [FLAGS]",
        f"       or, without a checkout, pretrain {kind} in place of the script: megapar pretrain {kind} [FLAGS]",
        "",
        "megapar configs lists the names of configurations.",
        "The last of repeated flags wins, and the command line overrides YAML files. --no-FLAG turns a switch off.",
    ]
    for group, listed in GROUPS.items():
        flags = [flag for flag in FLAGS.values() if flag.group == group and kind in flag.models]
        if not flags:
            continue
        lines += ["", f"{group}: {listed.title}"]
        for flag in flags:
            lines.append(f"  {signature(flag)}")
            lines += textwrap.wrap(
                describe(flag, kind),
                WIDTH,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"
