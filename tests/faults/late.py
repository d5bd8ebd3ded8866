"""``python -m tests.faults.late SECONDS ARGUMENTS``: ``megapar ARGUMENTS``, where the clock is ahead by that."""

from __future__ import annotations

import datetime
import sys
import time

AHEAD = float(sys.argv[1])
_time, _datetime = time.time, datetime.datetime


class Late(_datetime):
    """Of the other clock."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Late:  # type: ignore[override]
        """As there."""
        return cls.fromtimestamp(_time() + AHEAD, tz)


if __name__ == "__main__":
    time.time = lambda: _time() + AHEAD
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from megapar.tools.launcher import rendezvous
    from megapar.tools.main import main

    dynamic_rendezvous.datetime = rendezvous.datetime = Late  # type: ignore[misc,attr-defined]
    sys.exit(main(sys.argv[2:]))
