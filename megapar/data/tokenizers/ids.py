"""Facts about the ids of a tokenizer, which a checkpoint records and compares with those of another tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megapar.data.cache import find_entry, hash_parts, make_once
from megapar.data.tokenizers.load import tokenizer_source
from megapar.data.tokenizers.tokenizer import MockTokenizer, NoTokenizer, Tokenizer
from megapar.files.location import at
from megapar.files.regular_file import read_json

_VERSION = "2"  # increased when the facts change
_LARGE_BYTES = 16 << 20
_OF_A_TOKENIZER = re.compile(r"tokenizer|vocab|merges|special_tokens|added_tokens|.*\.(model|tiktoken|spm)$")
"""Files with such names are read at any size, other files up to _LARGE_BYTES."""

Facts = dict[str, Any]
"""Facts about a tokenizer:

fingerprint: hash of its files.
ids: hash of every token's id and of the ids of some texts; None if the fingerprint determines them.
size: number of ids.
joins: hash of the merges, or of the scores of pieces, if the library exposes them; missing in older facts.
"""

_PROBES = (
    "The quick brown fox jumps over the lazy dog. 1234567890 3.14 -42",
    " leading  spaces\tand\nlines\r\n\n  def f(x):\n    return x[0] # code",
    "Ünïcödé, Καλημέρα, Привет, 你好世界, こんにちは, 안녕하세요, مرحبا, שלום, नमस्ते 👩‍👩‍👧 ﬁ ½ ＡＢＣ",
)


def facts_of(tokenizer: Tokenizer, path: str | None = None) -> Facts | None:
    """Return the facts of a tokenizer; None for a run without text, whose weights do not depend on a tokenizer.

    ``path`` is the file or folder that it was loaded from; with it, the facts are remembered for ``known_facts``. The
    fingerprint covers the library's internal form, which may change with its version, so the facts include ids.
    """
    if isinstance(tokenizer, (NoTokenizer, MockTokenizer)):
        return None
    ids = None
    if not isinstance(getattr(tokenizer, "model", None), bytes):
        ids = hash_parts(*(json.dumps(probe) for probe in tokenizer.encode_batch(_PROBES)), repr(tokenizer.special))
        ids = hash_parts(ids, json.dumps(getattr(tokenizer, "vocabulary", {}), sort_keys=True))
    facts: Facts = {"fingerprint": tokenizer.fingerprint(), "ids": ids, "size": tokenizer.size}
    merges = getattr(tokenizer, "merges_or_scores", None)
    if merges is not None:
        facts["joins"] = hash_parts(json.dumps(merges))
    if path is not None and ids is not None:
        make_once(_entry(Path(path)), lambda entry: _write(entry, facts))
    return facts


def known_facts(path: str) -> Facts | None:
    """Return the facts of a path for --tokenizer-model without loading its library; None if they need the library."""
    try:
        source = tokenizer_source(Path(path))
        if source.is_file() and source.suffix != ".json":
            return {"fingerprint": at(source).sha256()[:32], "ids": None, "size": None}
        entry = find_entry(_entry(source))
        return None if entry is None else read_json(entry)
    except (OSError, ValueError):
        return None


def same_ids(first: Facts, second: Facts) -> bool:
    """Return True if two tokenizers produce the same ids."""
    if first.get("fingerprint") == second.get("fingerprint"):
        return True
    merges = first.get("joins"), second.get("joins")
    if None not in merges and merges[0] != merges[1]:
        return False
    return first.get("ids") is not None and first.get("ids") == second.get("ids")


def _write(entry: Path, facts: Facts) -> None:
    entry.write_text(json.dumps(facts), encoding="utf-8")


def _entry(path: Path) -> str:
    """Return the cache entry for everything that may decide the ids; large files, such as weights, are not read."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    parts = (part for file in files for part in (file.name, _content(file)))
    return f"tokenizer-facts/{hash_parts(_VERSION, *parts)}.json"


def _content(file: Path) -> str:
    size = file.stat().st_size
    if size > _LARGE_BYTES and not _OF_A_TOKENIZER.match(file.name):
        return f"{size} bytes"
    return at(file).sha256()
