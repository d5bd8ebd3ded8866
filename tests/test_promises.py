"""Sentences of the README and of docs/ that say bit, exact, identical or never: each has its test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = {"architectures", "compatibility", "conformance", "flags", "museum", "presets", "rules_proof"}
STRONG = re.compile(r"\b(bits?|bitwise|exact|exactly|identical|identically|never)\b", re.IGNORECASE)

# Page, some words of the sentence, and the test (below tests/) that would fail if it were not true.
PROMISES = [line.split("\t") for line in (ROOT / "tests" / "promises.tsv").read_text(encoding="utf-8").splitlines()]
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
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n|\n(?=[*|#-])", text) if page.stem not in GENERATED else ():
            parts = re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*0-9])|\|", " ".join(paragraph.split()))
            found += [(page.name, part.strip()) for part in parts if STRONG.search(part)]
    return found


def test_every_strong_sentence_has_its_test() -> None:
    sentences = strong_sentences()
    unknown = [
        f"{page}: {sentence}"
        for page, sentence in sentences
        if not any(words in sentence for words in NO_PROMISES)
        and not any(page == where and words in sentence for where, words, _ in PROMISES)
    ]
    assert unknown == [], "name the test of each in PROMISES, or choose other words"
    stale = [row for row in PROMISES if not any(page == row[0] and row[1] in sentence for page, sentence in sentences)]
    assert stale == []


def test_the_tests_of_promises_exist() -> None:
    for row in PROMISES:
        file, _, name = row[2].partition("::")
        assert f"def {name or 'test_'}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), row
