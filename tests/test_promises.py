"""Promises: their words are on the pages, their commands exist, and no sentence with a strong word lacks a line."""

from __future__ import annotations

import re
from pathlib import Path

from tests.promises import PAGE, mistakes, page, promises

ROOT = Path(__file__).parents[1]
GENERATED = {"architectures", "compatibility", "conformance", "flags", "museum", "presets", "promises", "rules_proof"}
STRONG = re.compile(r"\b(bits?|bitwise|exact|exactly|identical|identically|never)\b", re.IGNORECASE)
PROMISES = promises()
# Sentences that say what was not run, what a word means, or what others wrote; widths, faults and columns of tables.
NO_PROMISES = (
    *("has never run", "never on several", "never run on an NPU", "never run at such lengths"),
    *(
        "never trained at full size",
        "cannot hope to achieve exact",
        "16-bit",
        "16 or 32 bits",
        "bit flip",
        "flips once",
    ),
    *("equal bits in five runs", "stuck from the moment", "whether the backward repeats", "# Reliability"),
    "was never more than 1",
)


def strong_sentences() -> list[tuple[str, str]]:
    """The pages' sentences with one of the words, outside of blocks of code; cells of tables are sentences."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n|\n(?=[*|#-])", text) if path.stem not in GENERATED else ():
            parts = re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*0-9])|\|", " ".join(paragraph.split()))
            found += [(path.name, part.strip()) for part in parts if STRONG.search(part)]
    return found


def test_every_strong_sentence_has_its_test() -> None:
    known = {(name, words) for one in PROMISES for name, words in zip(one.pages, one.words, strict=True)}
    unknown = [
        f"{name}: {sentence}"
        for name, sentence in strong_sentences()
        if not any(words in sentence for words in NO_PROMISES)
        and not any(name == where and words in sentence for where, words in known)
    ]
    assert unknown == [], "give each a line in promises.tsv, or choose other words"


def test_words_are_on_their_pages_and_commands_exist() -> None:
    assert [*mistakes(PROMISES)] == []


def test_no_words_are_promised_twice() -> None:
    words = [(name, some) for one in PROMISES for name, some in zip(one.pages, one.words, strict=True)]
    assert sorted(one for one in set(words) if words.count(one) > 1) == []


def test_every_page_promises_something() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if path.stem not in GENERATED}
    assert pages | {"README.md"} == {name for one in PROMISES for name in one.pages}


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text("utf-8") == page(PROMISES), "run python -m tests.promises"
