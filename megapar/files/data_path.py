"""The words of ``--data-path``: paths, each after its weight or all without."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def blend_of(paths: Sequence[str]) -> tuple[tuple[Fraction | None, str], ...]:
    """Parse ``0.7 A 0.3 B`` into pairs of weight and path; paths without weights have None.

    There are weights if the first item is a number; a file whose name is a number is written as ``./7``. Raises
    ValueError if weights and paths do not alternate, or a weight is 0.
    """
    if not paths or not NUMBER.fullmatch(paths[0]):
        if any(NUMBER.fullmatch(path) for path in paths):
            raise ValueError("a weight follows its path instead of preceding it")
        return tuple((None, path) for path in paths)
    weights, names = paths[::2], paths[1::2]
    if len(weights) != len(names) or any(NUMBER.fullmatch(name) for name in names):
        raise ValueError("weights and paths do not alternate")
    if not all(NUMBER.fullmatch(weight) and Fraction(weight) > 0 for weight in weights):
        raise ValueError("not every weight is a number above 0")
    return tuple((Fraction(weight), name) for weight, name in zip(weights, names, strict=True))
