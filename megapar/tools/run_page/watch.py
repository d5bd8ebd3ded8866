"""``megapar report --watch``: the page of a live run, written again whenever the files of the run have grown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from megapar.errors import ConfigError
from megapar.files.location import Location

DISK_SECONDS, STORE_SECONDS = 2.0, 15.0  # between two looks; in a store each is a request that is paid for
RELOAD_SECONDS = 10  # after which a browser reads the page again
SHARE = 0.1  # of the time, at most, is spent on writing pages: those of a long run take a while

WritePage = Callable[[bool], bool]
"""Writes the page, given whether it reloads itself, and returns True if all runs have ended."""


def watch(runs: Sequence[Location], write: WritePage) -> None:
    """Write the page at each change until all runs have ended, or until Ctrl-C; then once more without reloading.

    A run writes its files at each log interval. One that has died may be resumed, and has not ended. Raises what the
    first page raises; a later failure is reported, and tried again.
    """
    look = max(DISK_SECONDS if run.local_path() is not None else STORE_SECONDS for run in runs)
    seen: dict[str, int | None] | None = None
    said, wait = "", look
    try:
        while True:
            try:
                found = _files(runs)
                if found != seen and (_has_steps(found) or not found):
                    began = time.monotonic()
                    if write(True):
                        break
                    said, wait = "", max(look, (time.monotonic() - began) / SHARE)
                    seen = found
            except (ConfigError, OSError) as error:
                if seen is None:
                    raise
                if str(error) != said:
                    print(f"megapar report: {error}; trying again", file=sys.stderr)
                said = str(error)
            time.sleep(wait)
    except KeyboardInterrupt:
        print()
    write(False)


def _files(runs: Sequence[Location]) -> dict[str, int | None]:
    """Return the sizes of the files that runs write, also of a run below a folder on a disk."""
    found: dict[str, int | None] = {}
    for run in runs:
        own = _sizes(run)
        below = run.glob("*/metrics.jsonl") if run.local_path() is not None and not _has_steps(own) else ()
        found |= own
        for file in below:
            found |= _sizes(file.parent)
    return found


def _sizes(folder: Location) -> dict[str, int | None]:
    with suppress(OSError):  # writing the page will say that it cannot be read
        sizes = folder.list().items()
        return {str(folder / name): size for name, size in sizes if name.endswith((".json", ".jsonl"))}
    return {}


def _has_steps(found: Mapping[str, int | None]) -> bool:
    return any(size for name, size in found.items() if name.endswith(".jsonl"))
