"""The table of architectures and checks, with what each check measured: ``scripts/conformance.sh``."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from tests.model.conformance.case import Case
from tests.model.conformance.checks import CHECKS, Figure
from tests.model.conformance.rows import ROWS, Row

PREFACE = """# Conformance

Every published architecture against its class in transformers, on small random configurations with padding: what the
checks of `tests/model/conformance` measure ({versions}). The suite runs them (`-m table` the steps and
bf16 of a class's second row); this page is written by `scripts/conformance.sh --write docs/conformance.md`. *Exact* is
the class in true fp64, where its casts to fp32 are read as fp64. An architecture is added by a row of
`tests/model/conformance/rows.py`; one that needs a wider bound is refused instead.

```bash
scripts/conformance.sh --row Mistral
```

"""


def measure(row: Row) -> dict[str, Figure | None]:
    """Run every check of a row."""
    figures: dict[str, Figure | None] = {}
    with tempfile.TemporaryDirectory() as root:
        case = Case(row, Path(root))
        for name, check in CHECKS.items():
            found = check(case)
            figures |= found if isinstance(found, dict) else {name: found}
    return figures


def shown(figure: Figure | None) -> str:
    """A cell of the table, in bold if it is out of bounds."""
    if figure is None:
        return "-"
    text = f"{figure.value:.0f}" if figure.bound == 0 else f"{figure.value:.2g}"
    return text if figure.holds else f"**{text}**"


def main() -> int:
    """Print the table row by row. Status 1 if a figure is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the table to this page")
    parser.add_argument("--row", action="append", help="names of rows; by default all")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    lines, bad, bounds = [], [], {}
    for row in [row for row in ROWS if not options.row or row.name in options.row]:
        figures = measure(row)
        bounds |= {name: f"{figure.bound:g}" for name, figure in figures.items() if figure}
        if not lines:
            print(_line("class", figures), flush=True)
        lines.append(_line(row.name, map(shown, figures.values())))
        print(lines[-1], flush=True)
        wrong = {name: figure for name, figure in figures.items() if figure and not figure.holds}
        bad += [f"{row.name}, {name}: {f.value:.3g}; {'; '.join(f.what)}" for name, f in wrong.items()]
    heads = [_line("class", figures), _line("---", ["---"] * len(figures))]
    lines = [*heads, _line("at most", (bounds.get(name, "") for name in figures)), *lines]
    print(lines[2], *bad, sep="\n")
    if options.write is not None:
        _write(options.write, lines)
    return 1 if bad else 0


def _line(first: str, cells: Iterable[str]) -> str:
    return "| " + " | ".join([first, *cells]) + " |"


def _write(page: Path, lines: list[str]) -> None:
    """Write the page, with the lines that it has of other rows."""
    before = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    of_row = {line.split(" | ")[0].removeprefix("| "): line for line in (*before, *lines) if line.startswith("| ")}
    lines = [*lines[:3], *(of_row[row.name] for row in ROWS if row.name in of_row)]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    meanings = [f"* {name}: {' '.join((check.__doc__ or '').split())}" for name, check in CHECKS.items()]
    page.write_text(PREFACE.format(versions=versions) + "\n".join([*lines, "", *meanings]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
