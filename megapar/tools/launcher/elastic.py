"""What an elastic job starts on every rank: the script, with the layout for the ranks that are really there.

python .../own.py megapar.tools.launcher.elastic ASKED_RANKS SCRIPT FLAGS...
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
    """(script and flags for so many ranks, what there is to say). Raises LookupError where no layout is legal."""
    asked, script, *flags = argv
    kinds = [kind for kind, name in SCRIPTS.items() if name == Path(script).name]
    if not kinds or ranks == int(asked):
        return [script, *flags], ""
    found = nearest(kinds[0], flags, int(asked), ranks)
    if found is None:
        raise LookupError(f"no layout of {ranks} ranks is legal for this run, which asks for {asked}")
    return [script, *found.flags], f"{ranks} of {asked} ranks are there: {found.changes}; the global batch stays"


def main(argv: Sequence[str]) -> int:
    """Become the script; 2 where no layout is legal."""
    make_patient()
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        line, told = command(argv, int(os.environ["WORLD_SIZE"]))
    except LookupError as error:
        if speaks:
            print(f"megapar launch: {error}", file=sys.stderr)
        return 2
    if told and speaks:
        print(f"megapar launch: {told}", file=sys.stderr, flush=True)
    become(["-u", *line])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
