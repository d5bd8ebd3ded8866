"""Packages that every installation has, and the sentence about one that is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("torch", "numpy", "safetensors", "yaml", "rich")
ROOT = Path(__file__).parents[2]
"""The checkout, or the folder of an installation's packages."""


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
