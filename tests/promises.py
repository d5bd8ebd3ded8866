"""Promises of the README and of docs/, and the command that shows each: tests/promises.tsv and docs/promises.md.

python -m tests.promises            write the page
python -m tests.promises --check    only report what is wrong, with exit status 1

A line has tabs between the pages, some words of each (one for all of them, or ``||`` between them), the commands
(``;`` between them), and, of a figure, where its result is kept.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megapar.tools.main import COMMANDS

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "tests" / "promises.tsv", ROOT / "docs" / "promises.md"

HEAD = """# Promises

Written by `python -m tests.promises` from `tests/promises.tsv`; do not edit. Each promise of the README and of the
hand-written pages in some of its words, the pages that make it, and the command that shows it. {number} promises; a
test checks that the words are on the pages, and that the tests, scripts and modules exist.

```bash
python -m tests.promises --check
```

`tests/...` stands for `.venv/bin/python -m pytest -n 0 tests/...`, with `-m table`, `-m flags` or `-m presets` where
pytest says that all was deselected. Commands with `--device cuda`, and the parts of `scripts/gpu_day.sh`, need a GPU; a
benchmark over a slow link needs root. *At* names a commit that has the benchmark, where the tree has only its results.
What was measured has its result behind the command: where it is kept, on what, and the date or the commit.
"""
IN_TESTS = re.compile(r"^(?=[\w/]+\.py)(?!scripts/)")
COLUMNS = """| promise | pages | shown by |
|---|---|---|
"""


@dataclass(frozen=True)
class Promise:
    """A line of the table.

    Attributes:
        pages: Names of the pages.
        words: The words on each of them.
        commands: What shows that it holds.
        result: Where a figure is kept, and what it is of; "" if it is none.
    """

    pages: tuple[str, ...]
    words: tuple[str, ...]
    commands: tuple[str, ...]
    result: str = ""


def promises() -> list[Promise]:
    """Return the table. Raises ValueError if a line has more or fewer words than pages."""
    found = []
    for line in TABLE.read_text("utf-8").splitlines():
        pages, words, commands, *result = line.split("\t")
        names, parts = pages.split(" "), words.split(" || ")
        parts *= len(names) if len(parts) == 1 else 1
        if len(names) != len(parts) or len(result) > 1:
            raise ValueError(f"not a promise: {line}")
        found.append(Promise(tuple(names), tuple(parts), tuple(commands.split(" ; ")), *result))
    return found


def path_of(page: str) -> Path:
    """Return the file of a page."""
    return ROOT / page if page == "README.md" else ROOT / "docs" / page


def mistakes(table: Sequence[Promise]) -> Iterator[str]:
    """Yield what is wrong: words that are not on their page, and commands and results that do not exist."""
    texts = {name: " ".join(path_of(name).read_text("utf-8").split()) for one in table for name in one.pages}
    for one in table:
        for name, words in zip(one.pages, one.words, strict=True):
            if " ".join(words.split()) not in texts[name]:
                yield f"{name}: not on the page: {words}"
        yield from (f"{one.pages[0]}: does not exist: {command}" for command in one.commands if not exists(command))
        kept = one.result.partition(":")[0]
        if kept and not (ROOT / kept).is_file():
            yield f"{one.pages[0]}: no such result: {kept}"


def exists(command: str) -> bool:
    """Return True if what a command begins with is here: a test, a script, a module or a subcommand of megapar."""
    if before := re.match(r"at (\w+): python -m (benchmarks\.\w+)\.run$", command):
        return before[1] in (ROOT / before[2].replace(".", "/") / "README.md").read_text("utf-8")
    first, *rest = command.split(" ")
    if first == "python" and rest[0] == "-m":
        return (ROOT / f"{rest[1].replace('.', '/')}.py").is_file()
    if first == "megapar":
        return rest[0] in COMMANDS
    if first in ("python", "du"):
        return first == "du" or (ROOT / rest[0]).is_file()
    if first.startswith("scripts/"):
        return (ROOT / first).is_file()
    file, _, name = first.partition("::")
    text = (ROOT / "tests" / file).read_text("utf-8") if (ROOT / "tests" / file).is_file() else ""
    return bool(re.search(rf"^\s*def {name}\(" if name else r"^\s*def test_", text, re.MULTILINE))


def page(table: Sequence[Promise]) -> str:
    """Return docs/promises.md: a table for each page that is the first to make a promise."""
    text = HEAD.format(number=len(table))
    ordered = sorted(table, key=lambda one: (one.pages[0] != "README.md", one.pages[0]))
    for name, group in groupby(ordered, key=lambda one: one.pages[0]):
        text += f"\n## {name.removesuffix('.md')}\n\n{COLUMNS}{''.join(map(_row, group))}"
    return text


def _row(one: Promise) -> str:
    plain = re.sub(r"\[?([^\[\]]*)\](\([^)]*\))?", r"\1", one.words[0])  # of a link, its text
    links = ", ".join(f"[{name.removesuffix('.md')}]({'../' * (name == 'README.md')}{name})" for name in one.pages)
    shown = ", ".join(f"`{re.sub(IN_TESTS, 'tests/', command)}`" for command in one.commands)
    kept, _, what = one.result.partition(":")
    if kept:
        inside = kept.removeprefix("docs/")
        shown += f"; [{kept}]({inside if inside != kept else f'../{kept}'}){',' * bool(what)}{what}"
    cells = (cell.replace("|", r"\|") for cell in (plain.strip(" |"), links, shown))
    return f"| {' | '.join(cells)} |\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or check it. Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    table = promises()
    if not options.check:
        PAGE.write_text(page(table), "utf-8")
    wrong = [*mistakes(table)]
    if PAGE.read_text("utf-8") != page(table):
        wrong.append("docs/promises.md is stale: run python -m tests.promises")
    print("\n".join(wrong) or f"{len(table)} promises", file=sys.stderr if wrong else sys.stdout)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
