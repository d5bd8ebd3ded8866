"""Rank entry point of an elastic job: runs the program with a layout for the ranks that are present.

python .../own.py megapar.tools.launcher.elastic REQUESTED_RANKS PROGRAM FLAGS...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megapar.planning.nearest import nearest
from megapar.tools.launcher.fresh import become
from megapar.tools.launcher.program import Program
from megapar.training.reports.streams import make_patient


def command(argv: Sequence[str], ranks: int) -> tuple[list[str], str]:
    """Return (program and flags for ``ranks`` ranks, a message about what changed or "").

    Raises LookupError if no layout for that number of ranks is legal.
    """
    requested, program = argv[0], Program.of(argv[1:])
    if not program.kind or ranks == int(requested):
        return [*argv[1:]], ""
    layout = nearest(program.kind, program.flags, int(requested), ranks)
    if layout is None:
        raise LookupError(f"no layout of {ranks} ranks is legal for this run, which requests {requested}")
    message = f"{ranks} of {requested} ranks are present: {layout.changes}; the global batch is unchanged"
    return [*program.start, *layout.flags], message


def main(argv: Sequence[str]) -> int:
    """Turn this process into the program. Return 2 if no layout is legal."""
    make_patient()
    is_first_rank = os.environ.get("RANK", "0") == "0"
    try:
        program_and_flags, message = command(argv, int(os.environ["WORLD_SIZE"]))
    except LookupError as error:
        if is_first_rank:
            print(f"megapar launch: {error}", file=sys.stderr)
        return 2
    if message and is_first_rank:
        print(f"megapar launch: {message}", file=sys.stderr, flush=True)
    become(["-u", *program_and_flags])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
