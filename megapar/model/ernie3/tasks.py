"""The objectives of ERNIE 3.0 by name, and the text that mixes them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import factorial

KNOWLEDGE_MLM, DOCUMENT_LM, REORDER = "knowledge_mlm", "document_lm", "sentence_reorder"
DISTANCE, KNOWLEDGE_TEXT = "sentence_distance", "knowledge_text"
TASKS = (KNOWLEDGE_MLM, DOCUMENT_LM, REORDER, DISTANCE, KNOWLEDGE_TEXT)
CLASSES = (REORDER, DISTANCE)  # one class per sample; the others ask for tokens
GENERATION = (DOCUMENT_LM,)  # run through the causal branch; the others through the bidirectional one
DISTANCES = 3  # adjacent, of one document, of different documents
DEFAULT_TASKS = "knowledge_mlm:1.0,document_lm:1.0,sentence_reorder:0.5,sentence_distance:0.5"


def tasks_of(text: str | None) -> Mapping[str, Fraction]:
    """``knowledge_mlm:1.0,document_lm:0.5`` to shares of the samples, in the order of TASKS. Raises ValueError."""
    found: dict[str, Fraction] = {}
    for item in (text or DEFAULT_TASKS).split(","):
        name, _, weight = item.strip().partition(":")
        if name not in TASKS:
            raise ValueError(f"{name!r} is none of {', '.join(TASKS)}")
        if name in found:
            raise ValueError(f"{name} stands twice")
        try:
            found[name] = Fraction(weight or "1")
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{item.strip()!r} is not NAME:WEIGHT") from None
        if found[name] < 0:
            raise ValueError(f"the weight of {name} is below 0")
    if not any(found.values()):
        raise ValueError("no task has a weight above 0")
    return {name: found[name] for name in TASKS if found.get(name)}


def reorder_classes(pieces: int) -> int:
    """Classes of sentence reordering with up to ``pieces`` pieces: all their permutations."""
    return sum(factorial(n) for n in range(1, pieces + 1))


def accuracy_of(task: str) -> str:
    """The term that counts a task's right answers."""
    return f"{task}_accuracy"
