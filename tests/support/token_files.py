"""Indexed files of tokens for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megapar.data.tokens.indexed import IndexedDatasetBuilder


def write_tokens(prefix: str | Path, documents: Iterable[Iterable[int]]) -> str:
    """Write documents of uint16 ids, each one sequence; return the prefix."""
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        for ids in documents:
            builder.add_item(list(ids))
            builder.end_document()
        builder.finalize()
    return str(prefix)
