"""Tasks of ERNIE 3.0, and the parser of ``--ernie-tasks``."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import factorial

KNOWLEDGE_MLM, DOCUMENT_LM, REORDER = "knowledge_mlm", "document_lm", "sentence_reorder"
DISTANCE, KNOWLEDGE_TEXT = "sentence_distance", "knowledge_text"
TASKS = (KNOWLEDGE_MLM, DOCUMENT_LM, REORDER, DISTANCE, KNOWLEDGE_TEXT)
CLASSES = (REORDER, DISTANCE)  # predict one class per sample; the other tasks predict tokens
GENERATION = (DOCUMENT_LM,)  # run the causal branch; the other tasks run the bidirectional one
DISTANCES = 3  # adjacent, of one document, of different documents
DEFAULT_TASKS = "knowledge_mlm:1.0,document_lm:1.0,sentence_reorder:0.5,sentence_distance:0.5"


def tasks_of(text: str | None) -> Mapping[str, Fraction]:
    """Parse ``knowledge_mlm:1.0,document_lm:0.5`` to shares of the samples, in the order of TASKS.

    Raises ValueError for unknown or repeated names, and for weights that are malformed, negative or all 0.
    """
    weights: dict[str, Fraction] = {}
    for item in (text or DEFAULT_TASKS).split(","):
        name, _, weight = item.strip().partition(":")
        if name not in TASKS:
            raise ValueError(f"{name!r} is not one of {', '.join(TASKS)}")
        if name in weights:
            raise ValueError(f"{name} occurs twice")
        try:
            weights[name] = Fraction(weight or "1")
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{item.strip()!r} is not NAME:WEIGHT") from None
        if weights[name] < 0:
            raise ValueError(f"the weight of {name} is below 0")
    if not any(weights.values()):
        raise ValueError("no task has a weight above 0")
    return {name: weights[name] for name in TASKS if weights.get(name)}


def reorder_classes(pieces: int) -> int:
    """Return the number of classes of sentence reordering: all permutations of up to ``pieces`` pieces."""
    return sum(factorial(n) for n in range(1, pieces + 1))


def accuracy_of(task: str) -> str:
    """Return the name of the term that counts a task's correct predictions."""
    return f"{task}_accuracy"
