"""Techniques of published runs that megapar does not implement. A plan may assume them, and marks them in its output.

    fp8                       matrix products of all linear layers in fp8
    fp8-mlp                   matrix products of feed-forward layers and experts in fp8
    fp8-activations           inputs that matrix products keep are stored in one byte per element
    operator-recompute:A+B    recompute the outputs of these operators instead of keeping them: norm, qkv, up,
                              activation, core; or combine (rows are weighted before the all-to-all back, so that none
                              are kept). A@4-8,10 applies to these layers only
    dualpipe                  run the pipeline in both directions: all-to-alls hide under the other direction's
                              computation, and each rank has two copies of the parameters

Standard library only. Tested in ``tests/planning/test_plan.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from megapar.errors import Complaint, ConfigError

NAMES = ("fp8", "fp8-mlp", "fp8-activations", "operator-recompute", "dualpipe")
OPERATORS = ("norm", "qkv", "up", "activation", "core", "combine")


@dataclass(frozen=True)
class Assumed:
    """Techniques that a plan assumes; none by default.

    Attributes:
        fp8: Matrix products in fp8: ``all``, ``mlp``, or "" for none.
        fp8_activations: Inputs that matrix products keep are stored in one byte per element.
        operators: Operators that are recomputed, each with its layers; None for all layers.
        dualpipe: Micro-batches pass the pipeline in both directions.
        words: The values of ``--assume``.
    """

    fp8: str = ""
    fp8_activations: bool = False
    operators: tuple[tuple[str, frozenset[int] | None], ...] = ()
    dualpipe: bool = False
    words: tuple[str, ...] = ()


def assumed(words: Sequence[str]) -> Assumed:
    """Parse the values of ``--assume``. Raises ConfigError for unknown techniques."""
    result, complaints = Assumed(words=tuple(words)), []
    for word in words:
        name, _, value = word.partition(":")
        try:
            result = _with(result, name, value)
        except ValueError as error:
            near = get_close_matches(name, NAMES, 2, 0.4)
            hint = f"Did you mean {' or '.join(near)}?" if near and name not in NAMES else ""
            complaints.append(Complaint("assume", f"--assume {word}: {error}.", hint))
    if complaints:
        raise ConfigError(complaints)
    return result


def check_assumed(assumption: Assumed, pp: int) -> None:
    """Raise ConfigError if a technique needs a pipeline and there is only one stage."""
    if assumption.dualpipe and pp == 1:
        message = "--assume dualpipe: one stage (--pp-degree 1) has no pipeline to run in both directions."
        raise ConfigError([Complaint("assume", message, "Set --pp-degree, or leave out dualpipe.")])


def _with(assumption: Assumed, name: str, value: str) -> Assumed:
    if name in ("fp8", "fp8-mlp") and not value:
        return replace(assumption, fp8="mlp" if name == "fp8-mlp" else "all")
    if name == "fp8-activations" and not value:
        return replace(assumption, fp8_activations=True)
    if name == "dualpipe" and not value:
        return replace(assumption, dualpipe=True)
    if name == "operator-recompute":
        parts = [word.partition("@") for word in value.split("+")]
        wrong = [operator for operator, _, _ in parts if operator not in OPERATORS]
        if wrong:
            raise ValueError(f"{', '.join(wrong) or 'nothing'} is not one of {', '.join(OPERATORS)}")
        return replace(assumption, operators=tuple((name, _layers(text) if at else None) for name, at, text in parts))
    raise ValueError(f"choose one of {', '.join(NAMES)}")


def _layers(text: str) -> frozenset[int]:
    """Parse ``4-8,10`` to layer numbers. Raises ValueError for malformed text."""
    numbers: set[int] = set()
    for word in text.split(","):
        first, _, last = word.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError("layers are numbers and ranges, as in up@4-8,10")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
