"""The README's table of equal numbers: a few layouts against one process, with the largest differences that are found.

python -m tests.equivalence.report                      the table, and a line per layout while it runs
python -m tests.equivalence.report --write README.md    also between the comments of that page
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from scripts.marked import replaced
from tests.equivalence.compare import differences, farthest
from tests.equivalence.product import STEPS, train
from tests.equivalence.run import Trace
from tests.equivalence.table import CROSS, EP2, FOUR_LAYERS, HIDDEN_MP, MP2, SP, ZERO_BUBBLE, Row, node_row, sliced_row

PART = "equal numbers: python -m tests.equivalence.report --write README.md"
RECOMPUTED = ("--recompute-interval", "1")
LAYOUTS: dict[str, Row] = {
    "optimizer states and gradients sharded": Row("moe", 4, ("--sharding-degree", "4", "--sharding-stage", "2")),
    "parameters sharded, too": Row("moe", 4, ("--sharding-degree", "4", "--sharding-stage", "3")),
    "tensor and sequence parallelism": Row("moe", 2, (*MP2, *SP)),
    "context parallelism, ring": Row("moe", 2, ("--cp-degree", "2")),
    "pipeline, zero bubble": Row("moe", 2, ("--pp-degree", "2", *ZERO_BUBBLE), FOUR_LAYERS, accumulation=4),
    "experts, dispatch by node": node_row(()),
    "AMPipe across layers": sliced_row(2, (*HIDDEN_MP, *CROSS), (4, (*EP2, *MP2, *SP)), (), 1),
    "tensors and pipeline, all recomputed": Row(
        "moe", 4, (*MP2, *SP, "--pp-degree", "2", *RECOMPUTED), FOUR_LAYERS, accumulation=4
    ),
}


def line(name: str, row: Row, loss: float, gradient: float) -> str:
    """Return the row of the table."""
    measured = " | ".join(f"{value:.0e}" if value else "0" for value in (loss, gradient))
    return f"| {name} | {row.world_size} | `{' '.join(row.layout)}` | {measured} |"


def table(lines: list[str]) -> str:
    """Return the table, with date and commit below it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return "\n".join(
        [
            "| layout | processes | flags | loss | gradients |",
            "|---|---|---|---|---|",
            *lines,
            "",
            f"*{datetime.date.today()}, commit {commit.strip()}, {STEPS} steps in fp64.*",
        ]
    )


def main() -> int:
    """Run the layouts and print the table. Return 1 if one of them differs from one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also write it between the comments of this page")
    asked = parser.parse_args()
    references: dict[tuple[str, ...], Trace] = {}
    lines = []
    for name, row in LAYOUTS.items():
        flags = row.reference_flags()
        if flags not in references:
            references[flags] = train(row, 1, flags, "gloo")
        got = train(row, row.world_size, row.flags(), "gloo")
        if wrong := differences(got, references[flags]):
            print(f"{name}: {wrong[0]}", file=sys.stderr)
            return 1
        lines.append(line(name, row, *farthest(got, references[flags])))
        print(lines[-1], flush=True)
    if asked.write:
        page = asked.write.read_text(encoding="utf-8")
        asked.write.write_text(replaced(page, PART, table(lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
