"""``megapar configs``: lists the configurations of the package, or prints one of them."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from megapar.config.yaml_file import FOLDER, SUFFIX, near_preset, preset_names
from megapar.schema.flag import SCRIPTS
from megapar.tools.parser import Parser

KIND_OF_SCRIPT = {script: kind for kind, script in SCRIPTS.items()}


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="megapar configs",
        description="List the configurations of the package with the model that each is for (megapar pretrain MODEL "
        "--config NAME), or print one of them, as in: megapar configs tiny > my.yaml",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this configuration")
    return parser


def main(argv: Sequence[str]) -> int:
    """List the configurations, or print one. Return 0, or 2 if there is none of that name."""
    name = make_parser().parse_args(argv).name
    if name is None:
        print(listing())
        return 0
    path = FOLDER / f"{name.removesuffix(SUFFIX)}{SUFFIX}"
    if path.name.removesuffix(SUFFIX) not in preset_names():
        hint = f"Did you mean {near}?" if (near := near_preset(name)) else "megapar configs lists them."
        print(f"megapar configs: the package has no configuration {name}. {hint}", file=sys.stderr)
        return 2
    sys.stdout.write(path.read_text(encoding="utf-8"))
    return 0


def listing() -> str:
    """Return a line for each configuration: its name, its model, and the first sentence of its header."""
    names = preset_names()
    width = max(map(len, names), default=0)
    return "\n".join(f"{name:{width}}  {_model(text):5}  {header_title(text)}" for name, text in _texts(names))


def _texts(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, (FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8")) for name in names]


def _model(text: str) -> str:
    found = re.search(r"^script: (\S+)$", text, re.MULTILINE)
    return KIND_OF_SCRIPT.get(found[1], "") if found else ""


def header_title(text: str) -> str:
    """Return the first sentence of a file's header, up to a semicolon; a remark in parentheses with one is left out."""
    paragraph = " ".join(line[2:] for line in text.partition("\n#\n")[0].splitlines() if line.startswith("# "))
    outside = re.sub(r" \([^)]*;[^)]*\)", "", paragraph)
    return re.split(r"\.(?=\s+[A-Z]|\s+source:|$)|;", outside)[0]
