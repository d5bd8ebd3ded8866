"""Packages that every installation has, and the sentences about one that is missing, or about another torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("torch", "numpy", "safetensors", "yaml", "rich")
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 14)
"""The first version that megapar runs with, and the last one that it was tested with (scripts/newest_torch.sh)."""
ROOT = Path(__file__).parents[2]  # the checkout, or the folder of an installation's packages


@contextmanager
def packages_or_exit() -> Iterator[None]:
    """Exit with one sentence and status 1 if this Python lacks a package that every installation has."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        activate = "source .venv/bin/activate" if (ROOT / ".venv").is_dir() else "scripts/setup.sh, or pip install ."
        sys.exit(f"megapar: {sys.executable} has no package {error.name}: {activate}")


def check_torch(environ: Mapping[str, str]) -> None:
    """Exit with one sentence and status 1 if torch is too old. Rank 0 says if it is newer than any that was tested."""
    from importlib.metadata import version  # takes longer to import than a refusal may

    found = version("torch")
    release = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST_TORCH, NEWEST_TORCH))
    if release < OLDEST_TORCH:
        sys.exit(f"megapar: torch {found} is too old: pip install 'torch>={oldest}'")
    if release > NEWEST_TORCH and (environ.get("RANK") or "0") == "0":
        sys.stderr.write(f"megapar: note: tested with torch {oldest} to {newest}, this is {found}\n")
