"""Rank entry point of an elastic job: runs the script with a layout for the ranks that are present.

python .../own.py megapar.tools.launcher.elastic REQUESTED_RANKS SCRIPT FLAGS...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megapar.planning.nearest import nearest
from megapar.schema.flag import SCRIPTS
from megapar.tools.launcher.fresh import become
from megapar.training.reports.streams import make_patient


def command(argv: Sequence[str], ranks: int) -> tuple[list[str], str]:
    """Return (script and flags for ``ranks`` ranks, a message about what changed or "").

    Raises LookupError if no layout for that number of ranks is legal.
    """
    requested, script, *flags = argv
    kinds = [kind for kind, name in SCRIPTS.items() if name == Path(script).name]
    if not kinds or ranks == int(requested):
        return [script, *flags], ""
    layout = nearest(kinds[0], flags, int(requested), ranks)
    if layout is None:
        raise LookupError(f"no layout of {ranks} ranks is legal for this run, which requests {requested}")
    message = f"{ranks} of {requested} ranks are present: {layout.changes}; the global batch is unchanged"
    return [script, *layout.flags], message


def main(argv: Sequence[str]) -> int:
    """Turn this process into the script. Return 2 if no layout is legal."""
    make_patient()
    is_first_rank = os.environ.get("RANK", "0") == "0"
    try:
        script_and_flags, message = command(argv, int(os.environ["WORLD_SIZE"]))
    except LookupError as error:
        if is_first_rank:
            print(f"megapar launch: {error}", file=sys.stderr)
        return 2
    if message and is_first_rank:
        print(f"megapar launch: {message}", file=sys.stderr, flush=True)
    become(["-u", *script_and_flags])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
